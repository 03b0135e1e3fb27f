// What all kernels share: ranges, memory that is kept between calls, and prefetching.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "kernels.h"

namespace {

constexpr int LINE = 64;  // bytes of a cache line

struct Range {
    int64_t begin, end;
};

// Weights of form 0.
inline const elem_t* numbers_of(const LinearArgs& c) { return static_cast<const elem_t*>(c.weights.data); }

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory of one thread, which grows and stays.
class Workspace {
   public:
    // Room for n numbers, in the place of what was taken before.
    template <class T>
    T* take(int64_t n) {
        size_t bytes = divide_up(n * sizeof(T), LINE) * LINE;
        if (bytes > size_) {
            memory_.reset(static_cast<char*>(std::aligned_alloc(LINE, bytes)));
            size_ = memory_ ? bytes : 0;
            if (!memory_) throw std::bad_alloc();
        }
        return reinterpret_cast<T*>(memory_.get());
    }

   private:
    std::unique_ptr<char, decltype(&std::free)> memory_{nullptr, &std::free};
    size_t size_ = 0;
};

// Prefetches a range of memory in order, some lines at a time.
struct Prefetcher {
    const char *at = nullptr, *end = nullptr;
    int64_t lines() const { return (end - at) / LINE; }
    void fetch(int64_t n) {
        for (; n > 0 && at < end; --n, at += LINE) _mm_prefetch(at, _MM_HINT_T1);
    }
};

}  // namespace
