"""How two processes talk: sockets, TLS, and the threads that send and receive.

address.py        ``host:port`` as a person writes it
connection.py     bytes both ways, whatever carries them
channel.py        a connection that speaks frames, with a thread for each direction
activity.py       what a worker does, in words, as its messages show it
clocks.py         what a peer's clock shows, by pings
links.py          how fast a link is
deadlines.py      how long anything may take

handshake.py      opens a conversation: dial, TLS, Hello, Welcome
compatibility.py  whether the two ends can work together

private.py        refuses files that others than their owner may use
token.py          the one secret by which they know each other
authority.py      the certificates that follow from it
tls.py            mutual TLS with those
tls_connection.py a connection through it
tls_faults.py     what OpenSSL reports, as a sentence that says what to do
"""
