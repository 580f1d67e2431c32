"""A strategy of the tests' own: v, k and q travel one by one, each as soon as it is made."""


def one_by_one(qkv, transfer, trace):
    with trace.span("project v", layer=transfer.layer):
        v = transfer.send(v=qkv.v())
    with trace.span("project qk", layer=transfer.layer):
        k = transfer.send(k=qkv.k())
        q = transfer.send(q=qkv.q())
    with trace.span("meanwhile", layer=transfer.layer):
        qkv.meanwhile()
    return v | k | q
