"""The API of llama.cpp's server, and the tokens' routes that vLLM's server has too."""
