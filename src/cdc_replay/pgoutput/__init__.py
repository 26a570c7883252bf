"""The wire format of pgoutput and nothing else (spec section 1).

| module   | content                                                    |
|----------|------------------------------------------------------------|
| messages | the messages as values                                     |
| reader   | the reference reader, for one message at a time            |
| columnar | the vectorised decoder: Arrow batch of messages to changes |
| kernels  | the compiled loops of columnar                             |

`docs/pgoutput.md` has more examples.

    >>> from cdc_replay.pgoutput.reader import decode
    >>> decode(bytes.fromhex("49 00004000 4e 0001 74 00000002 3432"))
    Insert(xid=None, relation=16384, new=TupleData(kinds=(<TupleKind.TEXT: 't'>,), values=(b'42',)))
"""
