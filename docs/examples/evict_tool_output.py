"""An agent that replaces all but its last four tool results by a note, in its own messages.

With `edits: amortize` the server computes the note and what is new. SmolLM2 is too small to choose tools: they are set.
"""

import time
from statistics import median

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
FILES, KEEP, NOTE = 9, 4, "[evicted: file read earlier]"
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [{"type": "function", "function": {"name": "read_file", "description": "A file.", "parameters": PARAMETERS}}]


def read_file(path: str) -> str:
    """A tool: some 500 tokens of a made-up file."""
    return " ".join(f"Line {line} of {path}: the shelf holds {line * len(path) % 17} boxes." for line in range(25))


def run(session: str, edits: str | None) -> list[float]:
    """Read all files; return the seconds to the first token of each turn in which something was evicted."""
    system = {"role": "system", "content": f"{session}. You count boxes. Say in one sentence what you see."}
    messages = [system, {"role": "user", "content": "Read the files one by one."}]
    seconds = []
    for number in range(FILES):
        path = f"shelf-{number}.txt"
        function = {"name": "read_file", "arguments": f'{{"path": "{path}"}}'}
        call = {"id": f"call-{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": f"I read {path}.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": read_file(path)})
        results = [message for message in messages if message["role"] == "tool"]
        for message in results[:-KEEP]:  # the edit
            message["content"] = NOTE
        # Without position-independent reuse, so that the two runs differ in edits alone.
        field = {"session": session, "explain": True, "reuse": "exact", **({"edits": edits} if edits else {})}
        start = time.perf_counter()
        stream = client.chat.completions.create(
            model="smollm2-135m",
            messages=messages,
            tools=TOOLS,
            tool_choice="none",  # scripted; "auto" needs enable_auto_tool_choice and tool_call_parser in engine_args
            max_tokens=16,
            stream=True,
            extra_body={"ropewalk": field},
        )
        first, text, told = 0.0, "", {}
        for chunk in stream:
            first = first or time.perf_counter() - start
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            told = (chunk.model_extra or {}).get("ropewalk") or told
        messages.append({"role": "assistant", "content": text})
        print(f"{session}, turn {number}: {1e3 * first:.0f} ms to the first token, {told['tokens']}")
        seconds += [first] if number >= KEEP else []
    return seconds


plain, spliced = run(f"Plain {time.time()}", None), run(f"Spliced {time.time()}", "amortize")
print(f"after an edit, median: {1e3 * median(plain):.0f} ms computed, {1e3 * median(spliced):.0f} ms spliced")
