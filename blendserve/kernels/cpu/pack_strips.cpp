// Blocks of a GGUF file, as in ggml-quants.c, to strips. Any bytes are weights: damaged ones give wrong numbers alone.
#include "strips.h"

namespace {

// A block of an output: codes of its inputs, and what they are scaled by.
struct Plain {
    uint8_t codes[256], scales[16], mins[16];
    uint16_t d, dmin;
};

// Codes of B bits: n bytes hold n inputs at their lowest bits, then n more, and so on.
template <int B>
void take_bits(const uint8_t* from, int n, int to_bit, uint8_t* codes) {
    for (int part = 0; part < 8 / B; ++part)
        for (int i = 0; i < n; ++i) codes[part * n + i] |= static_cast<uint8_t>((from[i] >> (B * part) & ((1 << B) - 1)) << to_bit);
}

template <class F>
void read_block(const uint8_t* b, Plain& p) {
    constexpr int K = F::KIND;
    std::memset(p.codes, 0, sizeof p.codes);
    auto half_at = [&](int at) { return load_as<uint16_t>(b + at); };
    if constexpr (K == Q4_0::KIND || K == IQ4_NL::KIND) {
        p.d = half_at(0);
        take_bits<4>(b + 2, 16, 0, p.codes);
    } else if constexpr (K == Q4_1::KIND) {
        p.d = half_at(0), p.dmin = half_at(2) ^ 0x8000;  // what is added
        take_bits<4>(b + 4, 16, 0, p.codes);
    } else if constexpr (K == Q5_0::KIND || K == Q5_1::KIND) {
        constexpr int at = F::MIN ? 4 : 2;
        p.d = half_at(0), p.dmin = half_at(2) ^ 0x8000;
        take_bits<4>(b + at + 4, 16, 0, p.codes);
        for (int i = 0; i < 32; ++i) p.codes[i] |= (b[at + i / 8] >> i % 8 & 1) << 4;
    } else if constexpr (K == Q8_0::KIND) {
        p.d = half_at(0);
        for (int i = 0; i < 32; ++i) p.codes[i] = b[2 + i] ^ 128;
    } else if constexpr (K == Q2_K::KIND) {
        for (int g = 0; g < 16; ++g) p.scales[g] = b[g] & 15, p.mins[g] = b[g] >> 4;
        for (int part = 0; part < 2; ++part) take_bits<2>(b + 16 + 32 * part, 32, 0, p.codes + 128 * part);
        p.d = half_at(80), p.dmin = half_at(82);
    } else if constexpr (K == Q3_K::KIND) {
        take_bits<1>(b, 32, 2, p.codes);
        for (int part = 0; part < 2; ++part) take_bits<2>(b + 32 + 32 * part, 32, 0, p.codes + 128 * part);
        for (int g = 0; g < 16; ++g)
            p.scales[g] = static_cast<uint8_t>((b[96 + g % 8] >> g / 8 * 4 & 15 | (b[104 + g % 4] >> g / 4 * 2 & 3) << 4) - 32);
        p.d = half_at(108);
    } else if constexpr (K == Q4_K::KIND || K == Q5_K::KIND) {
        p.d = half_at(0), p.dmin = half_at(2);
        const uint8_t* s = b + 4;
        for (int g = 0; g < 8; ++g) {
            p.scales[g] = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
            p.mins[g] = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4;
        }
        if (F::HIGH) take_bits<1>(b + 16, 32, 4, p.codes);
        for (int part = 0; part < 4; ++part) take_bits<4>(b + 16 + 32 * F::HIGH + 32 * part, 32, 0, p.codes + 64 * part);
    } else if constexpr (K == Q6_K::KIND) {
        for (int part = 0; part < 2; ++part) {
            take_bits<4>(b + 64 * part, 64, 0, p.codes + 128 * part);
            take_bits<2>(b + 128 + 32 * part, 32, 4, p.codes + 128 * part);
        }
        std::memcpy(p.scales, b + 192, 16);
        p.d = half_at(208);
    } else {
        p.d = half_at(0);
        for (int g = 0; g < 8; ++g) {
            p.scales[g] = static_cast<uint8_t>((b[4 + g / 2] >> g % 2 * 4 & 15 | (half_at(2) >> 2 * g & 3) << 4) - 32);
            take_bits<4>(b + 8 + 16 * g, 16, 0, p.codes + 32 * g);
        }
    }
}

// Bits of a unit's codes from `bit` on, as a plane: an output's words are VECTOR bytes apart.
template <int B>
void write_plane(const uint8_t* codes, int bit, char* to) {
    for (int i = 0; i < B; ++i) {
        uint32_t word = 0;
        for (int j = 0; j < 8 / B; ++j) {
            auto quad = load_as<uint32_t>(codes + 4 * (i * (8 / B) + j)) >> bit & 0x01010101u * ((1 << B) - 1);
            quad = (quad & 0xff0000ff) | (quad & 0xff00) << 8 | (quad >> 8 & 0xff00);
            word |= quad << (B * j);
        }
        std::memcpy(to + i * 4 * STRIP, &word, 4);
    }
}

// A strip of the blocks of up to STRIP outputs; the others' weights are 0.
template <class F>
void pack_strip(const PackArgs& c, int64_t o, char* to) {
    int n = static_cast<int>(std::min<int64_t>(STRIP, c.outputs - o));
    for (int64_t k = 0; k < c.inputs / F::SUPER; ++k, to += F::BYTES) {
        if (n < STRIP) std::memset(to, 0, F::BYTES);
        for (int i = 0; i < n; ++i) {
            Plain p;
            read_block<F>(c.blocks + (o + i) * c.blocks_row + k * F::FILE_BYTES, p);
            std::memcpy(to + 2 * i, &p.d, 2);
            if (F::MIN) std::memcpy(to + 2 * (STRIP + i), &p.dmin, 2);
            char* small = to + F::HEAD + i;
            for (int g = 0; F::SCALES && g < F::GROUPS; ++g) {
                small[g * STRIP] = static_cast<char>(p.scales[g]);
                if (F::MIN) small[(F::GROUPS + g) * STRIP] = static_cast<char>(p.mins[g]);
            }
            for (int u = 0; u < F::UNITS; ++u) {
                char* unit = to + F::HEAD + F::SMALL + u * F::BITS * F::VECTOR + 4 * i;
                write_plane<F::LOW>(p.codes + UNIT * u, 0, unit);
                if constexpr (F::HIGH > 0) write_plane<F::HIGH>(p.codes + UNIT * u, F::LOW, unit + F::LOW * F::VECTOR);
            }
        }
    }
}

}  // namespace

void blendserve_pack(const PackArgs& c) {
    by_form(c.form, [&](auto f) {
        using F = decltype(f);
#pragma omp parallel for schedule(dynamic, 4) num_threads(static_cast<int>(c.threads))
        for (int64_t o = 0; o < c.outputs; o += STRIP) pack_strip<F>(c, o, c.strips + o / STRIP * strip_bytes(F::KIND, c.inputs));
    });
}
