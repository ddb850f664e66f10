"""A LangGraph agent that cuts its old tool results: `pip install langgraph langchain-openai`, then this script.

`extra_body` is all that Ropewalk needs to know: which session it is, and that edits of its history are splices. The
rest is an ordinary graph. The embedded SmolLM2 is too small to choose tools, so its calls are scripted.
"""

from time import perf_counter, time

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

FILES, KEEP, NOTE = 8, 3, "[cut: read earlier]"

model = ChatOpenAI(
    model="smollm2-135m",
    base_url="http://127.0.0.1:8000/v1",
    api_key="none",
    max_tokens=16,
    extra_body={"ropewalk": {"session": f"langgraph-{time()}", "edits": "amortize"}},  # the flag
)


@tool
def read_file(path: str) -> str:
    """Read a file: some 500 tokens of a made-up one."""
    return " ".join(f"Line {line} of {path}: the shelf holds {line * len(path) % 17} boxes." for line in range(25))


def choose(state: MessagesState) -> dict:
    """Stand in for a model that calls tools."""
    number = sum(isinstance(message, ToolMessage) for message in state["messages"])
    call = {"name": "read_file", "args": {"path": f"shelf-{number}.txt"}, "id": f"call-{number}"}
    return {"messages": [AIMessage(f"I read shelf-{number}.txt.", tool_calls=[call])]}


def cut(state: MessagesState) -> dict:
    """Replace all but the last results by a note: a message with the id of an old one takes its place."""
    results = [message for message in state["messages"] if isinstance(message, ToolMessage)]
    return {"messages": [old.model_copy(update={"content": NOTE}) for old in results[:-KEEP]]}


def answer(state: MessagesState) -> dict:
    """Ask the model, and show how much of the prompt was not computed."""
    start = perf_counter()
    said = model.invoke(state["messages"])
    tokens = said.usage_metadata
    cached = tokens["input_token_details"].get("cache_read", 0)
    print(f"{1e3 * (perf_counter() - start):.0f} ms, {cached} of {tokens['input_tokens']} tokens cached")
    return {"messages": [said]}


def is_done(state: MessagesState) -> str:
    """Go on until all files are read."""
    return END if sum(isinstance(message, ToolMessage) for message in state["messages"]) == FILES else "choose"


graph = StateGraph(MessagesState)
for name, node in (("choose", choose), ("tools", ToolNode([read_file])), ("cut", cut), ("answer", answer)):
    graph.add_node(name, node)
for edge in ((START, "choose"), ("choose", "tools"), ("tools", "cut"), ("cut", "answer")):
    graph.add_edge(*edge)
graph.add_conditional_edges("answer", is_done)
first = [SystemMessage("You count boxes. Say in one sentence what you see."), HumanMessage("Read all files.")]
graph.compile().invoke({"messages": first}, {"recursion_limit": 100})
