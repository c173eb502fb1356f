"""The protocol: messages, their bytes and the rules of a conversation. Free of I/O."""
