// The formats of a KV pool, and the products that each uses.
#pragma once
#include "integer_blocks.h"
#include "key_tiles.h"

namespace {

// A format: the types of keys and values, the elements of a row of d dimensions, and the products.
struct FloatFormat {
    typedef float Key, Value;
    typedef Both<FloatKeys, FloatValues> Products;
    static int64_t stride(int d) { return d; }
};

#if defined(SOOTHSAY_MULTIPLIES_BF16)
typedef PairValues HalfValues;
#else
typedef FloatValues HalfValues;
#endif

struct HalfFormat {
    typedef bf16 Key, Value;
#if defined(SOOTHSAY_TILES)
    typedef Tiles<PairKeyTiles> Products;
#elif defined(SOOTHSAY_MULTIPLIES_BF16)
    typedef Both<PairKeys, PairValues> Products;
#else
    typedef Both<FloatKeys, FloatValues> Products;
#endif
    static int64_t stride(int d) { return d; }
};

struct IntegerFormat {
    typedef int16_t Key;
    typedef bf16 Value;
#if defined(SOOTHSAY_TILES)
    typedef Tiles<IntegerKeyTiles> Products;
#else
    typedef Both<IntegerKeys<int16_t>, HalfValues> Products;
#endif
    static int64_t stride(int d) { return integer_row<int16_t>(d); }
};

struct ByteFormat {
    typedef int8_t Key, Value;
    typedef Both<IntegerKeys<int8_t>, ByteValues> Products;
    static int64_t stride(int d) { return integer_row<int8_t>(d); }
};

}  // namespace
