"""What is said: messages, their bytes and the rules of a conversation. Does no I/O."""
