// silu(gate) * up of rows in one pass: what torch gives, to the bit (but bf16 below 2^-126 is 0). The exponential is the one
// that torch's vectors have, Sleef's expf. kernels/reference.py is the plain form.

#pragma once

#include "common.h"

namespace {

// Of numbers from -104 to 105, as more is 0 or infinity.
inline Floats exponential(Floats x) {
    Floats n = nearest(x * all(1.44269504088896341f));
    Floats s = fma(n, all(-0.693145751953125f), x);
    s = fma(n, all(-1.428606765330187045e-06f), s);
    Floats p = all(0.000198527617612853646278381f);
    p = fma(p, s, all(0.00139304355252534151077271f));
    p = fma(p, s, all(0.00833336077630519866943359f));
    p = fma(p, s, all(0.0416664853692054748535156f));
    p = fma(p, s, all(0.166666671633720397949219f));
    p = fma(p, s, all(0.5f));
    return times_2_to(all(1.0f) + fma(s * s, p, s), n);
}

// NaN stays: of a NaN and a number, `larger` gives the second.
inline Floats gated(Floats x, Floats up) {
    Floats minus = larger(all(-104.0f), all(-0.0f) - larger(all(-105.0f), x));
    return rounded(x / (all(1.0f) + exponential(minus))) * up;
}

}  // namespace
