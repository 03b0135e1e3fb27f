"""`blendserve bench gpu`: what blending gives on a CUDA GPU, in one run of a few minutes.

plan.py     what is measured, most important first; and a rehearsal of it all for a machine without a GPU
agree.py    a GPU against this machine's CPU, and every kernel against the formula
kernels.py  attention and placing alone
prefills.py whole prefills of readers in the shape of well-known ones
run.py      the steps one after the other, as long as there is time; tables.py shows what came out
"""
