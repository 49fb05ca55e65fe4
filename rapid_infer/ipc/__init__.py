"""An engine in a process of its own: messages as msgpack, frames over a socket, the process and its main loop."""
