"""The wire format of pgoutput and nothing else (spec section 1).

| module   | what it is                                                             |
|----------|------------------------------------------------------------------------|
| messages | the messages as values                                                 |
| reader   | bytes → message: the readable reference, for one message at a time     |
| columnar | Arrow batch of messages → Arrow batch of changes: the same, vectorised |
| kernels  | the compiled loops of columnar                                         |

`docs/pgoutput.md` has more examples.

    >>> from cdc_replay.pgoutput.reader import decode
    >>> decode(bytes.fromhex("49 00004000 4e 0001 74 00000002 3432"))
    Insert(xid=None, relation=16384, new=TupleData(kinds=(<TupleKind.TEXT: 't'>,), values=(b'42',)))
"""
