"""Child processes and the frames that go to and fro: what the engine process, ranks and compilers are started with."""
