"""What all APIs share: fields of chats and completions, prompts, parameters, the service that answers."""
