"""The workload generator: real multi-agent programs replayed against any OpenAI endpoint."""
