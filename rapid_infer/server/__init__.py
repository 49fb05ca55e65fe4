"""An OpenAI-compatible server over `AsyncLLM`: HTTP, JSON and parsers. Knows no torch."""
