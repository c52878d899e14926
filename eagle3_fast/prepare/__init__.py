"""Stage `prepare`: chats to token rows with loss masks; with `regenerate` before it and `vocab` after it."""
