// Attention by position in vectors, called for by itself: attend_vectors.h.

#include "attend_vectors.h"

extern "C" void blendserve_attend(const Call* call) {
    const Call& c = *call;
    if (!c.rows) return;
    int64_t items = divide_up(tiles_per_head(c), TILES) * c.kv;
    if (c.watched || (c.threads > 1 && items < 4 * c.threads))
        ByKeys(c).run();
    else
        by_rows(c);
}
