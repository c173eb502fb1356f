"""How it travels: sockets, TLS, handshakes and channels."""
