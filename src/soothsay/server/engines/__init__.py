"""One engine in a process of its own: its messages, its start, its loop, and the trial of grammars."""
