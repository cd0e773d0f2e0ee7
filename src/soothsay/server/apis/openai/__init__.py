"""OpenAI's API: chats, completions, responses, models."""
