"""The project's own codec: a layer is predicted from the layers below, and only what is left is coded.

    layer 0       depends on the token alone: which row of the tables it is
    layer l > 0   codes of layer l - 1 in int8 -> one linear map -> prediction
                  what is left -> axes -> one step of quantisation -> rANS in contexts (kernels/coding.py)

The decoder adds up integers, and rounds where IEEE 754 says how: the same record gives the same bits on every machine.
The encoder predicts from what the decoder will have, so nothing drifts.

CacheGen (arXiv 2310.07240) and KVTC (arXiv 2511.01815) code a layer by itself; here it costs what the layers below do not
tell. They weigh all errors alike; this weighs one by how much the reader's own next words change.
"""
