"""The project's own codec: a layer is predicted from the layers below, and only what is left is coded.

    layer 0       depends on the token alone: a row of the tables
    layer l > 0   codes of layer l - 1 in int8 -> one linear map -> prediction
                  residual -> axes -> one step of quantisation -> rANS in contexts (rans.py)

The decoder adds integers, and rounds by IEEE 754: the same record gives the same bits on every machine. The encoder
predicts from the values that the decoder will have, so errors do not accumulate.

CacheGen (arXiv 2310.07240) and KVTC (arXiv 2511.01815) code each layer alone; here a layer costs only the part that the
layers below do not predict. They weight all errors equally; this codec weights an error by its effect on the model's next
tokens.
"""
