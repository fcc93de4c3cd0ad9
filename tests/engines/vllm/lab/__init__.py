"""Real vLLM engines for tests: tiny models, an engine process one can kill, an API server."""
