"""How messages travel: sockets, TLS, handshakes and channels."""
