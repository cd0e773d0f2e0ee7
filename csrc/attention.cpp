// Attention of each row to its own path of keys, read from the KV pool in place.
//
// A row reads its keys in order of position, in blocks of BLOCK counted from position 0, with a running softmax over
// the blocks (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). Its result depends on
// its query and its own keys alone, so its bits are the same in any batch, tree or chunk, with any number of threads.
// The paths of a tree read their common context together, and then the rest of their keys separately.
#include "kernels.h"
#include "pool.h"
#include "simd.h"
#include "tiles.h"
#include <algorithm>
#include <vector>

namespace {

constexpr int BLOCK = 64;  // keys
#if defined(SOOTHSAY_TILES)
constexpr int TOGETHER = 128;  // approximate number of queries that share a pass over the keys
#else
constexpr int TOGETHER = 64;
#endif
constexpr float HIDDEN = -1e30f;
constexpr int TILES = BLOCK / LANES;             // registers for the scores of a block, one query
constexpr int WIDE = LANES == 16 ? 4 : 2;        // how many of them fit into registers for four queries

// A block of a head's keys and values in the layout of products: keys[t][j] has dimension j of LANES keys.
struct Floats {
    std::vector<float> q, keys, values;
    Floats(int queries, int d) : q(size_t(queries) * d), keys(size_t(BLOCK) * d), values(size_t(BLOCK) * d) {}

    void set_query(int r, const float* source, int d) { std::memcpy(&q[size_t(r) * d], source, 4 * d); }

    template <class T>
    void set_block(const T* const* k, const T* const* v, int d) {
        for (int i = 0; i < BLOCK; ++i) {
            float* column = &keys[size_t(i / LANES) * d * LANES + i % LANES];
            for (int j = 0; j < d; ++j) column[j * LANES] = widen(k[i][j]);
            for (int j = 0; j < d; j += LANES) store(&values[size_t(i) * d + j], load(v[i] + j));
        }
    }

    // Scores of queries r, ..., r + N - 1 against the block.
    template <int N>
    void scores(int r, int d, floats (*out)[TILES]) const {
        const float* x = &q[size_t(r) * d];
        for (int first = 0; first < TILES; first += WIDE) {
            floats s[N][WIDE] = {};
            for (int j = 0; j < d; ++j)
                for (int t = 0; t < WIDE; ++t) {
                    const floats k = load(&keys[(size_t(first + t) * d + j) * LANES]);
                    for (int n = 0; n < N; ++n) s[n][t] = fused(k, splat(x[n * d + j]), s[n][t]);
                }
            for (int n = 0; n < N; ++n)
                for (int t = 0; t < WIDE; ++t) out[n][first + t] = s[n][t];
        }
    }

    // Adds the block's values, weighted by p, to N accumulators of d floats.
    template <int N>
    void add(const floats (*p)[TILES], int d, float* acc) const {
        int j = 0;
        for (; j + WIDE * LANES <= d; j += WIDE * LANES) add_part<N, WIDE>(p, d, j, acc);
        for (; j < d; j += LANES) add_part<N, 1>(p, d, j, acc);
    }

    template <int N, int H>
    void add_part(const floats (*p)[TILES], int d, int j, float* acc) const {
        floats a[N][H];
        for (int n = 0; n < N; ++n)
            for (int h = 0; h < H; ++h) a[n][h] = load(acc + n * d + j + h * LANES);
        for (int i = 0; i < BLOCK; ++i)
            for (int h = 0; h < H; ++h) {
                const floats v = load(&values[size_t(i) * d + j + h * LANES]);
                for (int n = 0; n < N; ++n) a[n][h] = fused(v, splat(p[n][i / LANES][i % LANES]), a[n][h]);
            }
        for (int n = 0; n < N; ++n)
            for (int h = 0; h < H; ++h) store(acc + n * d + j + h * LANES, a[n][h]);
    }
};

#if defined(__AVX512BF16__)
// Words aligned to a cache line: loading tiles across lines is slow.
class Words {
    std::vector<floats> lines;

public:
    explicit Words(size_t size) : lines((size + LANES - 1) / LANES) {}
    uint32_t& operator[](size_t i) { return ((uint32_t*)lines.data())[i]; }
    const uint32_t& operator[](size_t i) const { return ((const uint32_t*)lines.data())[i]; }
};

// The same with products of bfloat16 pairs: queries and weights are rounded to bfloat16, sums are float.
struct Pairs {
    const int wide;                         // d, rounded up to whole tiles
    Words q, keys, values;  // [queries][d/2], [d/2][BLOCK], [BLOCK/2][wide]
    Pairs(int queries, int d)
        : wide((d + BLOCK - 1) / BLOCK * BLOCK), q(size_t(queries) * d / 2), keys(BLOCK * d / 2), values(BLOCK * wide / 2) {}

    static uint32_t pair(bf16 low, bf16 high) { return low.bits | uint32_t(high.bits) << 16; }

    void set_query(int r, const float* source, int d) {
        for (int j = 0; j < d / 2; ++j) q[size_t(r) * d / 2 + j] = pair(narrow(source[2 * j]), narrow(source[2 * j + 1]));
    }

    void set_block(const bf16* const* k, const bf16* const* v, int d) {
        const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                             36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        for (int t = 0; t < TILES; ++t)
            for (int j = 0; j < d / 2; j += LANES) transpose(k + t * LANES, 2 * j, &keys[size_t(j) * BLOCK + t * LANES]);
        for (int i = 0; i < BLOCK; i += 2)
            for (int j = 0; j < d; j += LANES) {
                __m512i a = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(v[i] + j)));
                __m512i b = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(v[i + 1] + j)));
                _mm512_storeu_si512(&values[size_t(i / 2) * wide + j], _mm512_permutex2var_epi16(a, low, b));
            }
    }

    // 32 dimensions of sixteen keys, from `first` on: a transposition of 16 x 16 pairs.
    static void transpose(const bf16* const* k, int first, uint32_t* out) {
        __m512i a[LANES], b[LANES];
        for (int i = 0; i < LANES; ++i) a[i] = _mm512_loadu_si512(k[i] + first);
        for (int i = 0; i < LANES; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < LANES; i += 4)
            for (int n = 0; n < 2; ++n) {
                a[i + 2 * n] = _mm512_unpacklo_epi64(b[i + n], b[i + 2 + n]);
                a[i + 2 * n + 1] = _mm512_unpackhi_epi64(b[i + n], b[i + 2 + n]);
            }
        for (int n = 0; n < 4; ++n)
            for (int i = 0; i < 2; ++i) {
                b[8 * i + n] = _mm512_shuffle_i32x4(a[8 * i + n], a[8 * i + 4 + n], 0x88);
                b[8 * i + 4 + n] = _mm512_shuffle_i32x4(a[8 * i + n], a[8 * i + 4 + n], 0xdd);
            }
        for (int n = 0; n < 8; ++n) {
            // b[n] and b[8 + n] have columns n % 4 + {0, 8} (n < 4) or + {4, 12} of both halves of the keys
            int column = n % 4 + (n < 4 ? 0 : 4);
            _mm512_storeu_si512(out + size_t(column) * BLOCK, _mm512_shuffle_i32x4(b[n], b[8 + n], 0x88));
            _mm512_storeu_si512(out + size_t(column + 8) * BLOCK, _mm512_shuffle_i32x4(b[n], b[8 + n], 0xdd));
        }
    }

    static void round(const floats* p, uint32_t* w) {
        for (int t = 0; t < TILES; ++t) keep((bf16*)w + t * LANES, p[t]);
    }

    template <int N>
    void scores(int r, int d, floats (*out)[TILES]) const {
        __m512 s[N][TILES] = {};
        const uint32_t* x = &q[size_t(r) * d / 2];
        for (int j = 0; j < d / 2; ++j)
            for (int t = 0; t < TILES; ++t) {
                __m512bh k = (__m512bh)_mm512_loadu_si512(&keys[size_t(j) * BLOCK + t * LANES]);
                for (int n = 0; n < N; ++n)
                    s[n][t] = _mm512_dpbf16_ps(s[n][t], (__m512bh)_mm512_set1_epi32(int(x[n * d / 2 + j])), k);
            }
        for (int n = 0; n < N; ++n)
            for (int t = 0; t < TILES; ++t) out[n][t] = (floats)s[n][t];
    }

    template <int N>
    void add(const floats (*p)[TILES], int d, float* acc) const {
        uint32_t w[N][BLOCK / 2];
        for (int n = 0; n < N; ++n) round(p[n], w[n]);
        int j = 0;
        for (; j + WIDE * LANES <= d; j += WIDE * LANES) add_part<N, WIDE>(w, d, j, acc);
        for (; j < d; j += LANES) add_part<N, 1>(w, d, j, acc);
    }

    template <int N, int H>
    void add_part(const uint32_t (*w)[BLOCK / 2], int d, int j, float* acc) const {
        __m512 a[N][H];
        for (int n = 0; n < N; ++n)
            for (int h = 0; h < H; ++h) a[n][h] = _mm512_loadu_ps(acc + n * d + j + h * LANES);
        for (int i = 0; i < BLOCK / 2; ++i)
            for (int h = 0; h < H; ++h) {
                __m512bh v = (__m512bh)_mm512_loadu_si512(&values[size_t(i) * wide + j + h * LANES]);
                for (int n = 0; n < N; ++n)
                    a[n][h] = _mm512_dpbf16_ps(a[n][h], (__m512bh)_mm512_set1_epi32(int(w[n][i])), v);
            }
        for (int n = 0; n < N; ++n)
            for (int h = 0; h < H; ++h) _mm512_storeu_ps(acc + n * d + j + h * LANES, a[n][h]);
    }
};
#endif

#if defined(SOOTHSAY_TILES)
// The same products in tiles of up to 16 queries. Their sums differ from those of vectors, so a single query uses tiles too.
struct Tiles : Pairs {
    const int height;  // queries of a tile; a tile may begin at any query
    const TileShape shape;

    Tiles(int queries, int d) : Tiles(queries, d, (queries + TILE_ROWS - 1) / TILE_ROWS) {}

    // Scores of a tile's queries, from r on, against the block.
    void scores(int r, int d, floats (*out)[TILES]) const {
        zero_tiles();
        for (int j = 0; j < d / 2; j += TILE_STEPS)
            multiply_tiles((const bf16*)&q[size_t(r) * d / 2 + j], 2 * d, (const uint8_t*)&keys[size_t(j) * BLOCK],
                           4 * BLOCK);
        store_tiles(out, 4 * BLOCK);
    }

    // BLOCK dimensions of the block's values, from j on, weighted by w.
    void weighted(const uint32_t (*w)[BLOCK / 2], int j, floats (*out)[TILES]) const {
        zero_tiles();
        for (int i = 0; i < BLOCK / 2; i += TILE_STEPS)
            multiply_tiles((const bf16*)&w[0][i], 2 * BLOCK, (const uint8_t*)&values[size_t(i) * wide + j], 4 * wide);
        store_tiles(out, 4 * BLOCK);
    }

private:
    Tiles(int queries, int d, int tiles)
        : Pairs(queries + TILE_ROWS - 1, d), height((queries + tiles - 1) / tiles), shape(height, TILE_STEPS) {}
};
#endif

template <class T> struct Products { using type = Floats; };
#if defined(SOOTHSAY_TILES)
template <> struct Products<bf16> { using type = Tiles; };
#elif defined(__AVX512BF16__)
template <> struct Products<bf16> { using type = Pairs; };
#endif

struct Shape {
    int heads;             // of keys
    int values;            // the number of the first head of values: 0 if keys are the values too
    int group, d;          // query heads of each key head, dimensions (a multiple of 32)
    int64_t slots;         // of the pool
    float softcap;         // 0: none
    int64_t window;        // 0: none; see kernels.h
    const float* sinks;    // [heads * group], or null

    int64_t first_seen(int64_t position) const {
        if (window < 0) return position / -window * -window;
        return window && position >= window ? position - window + 1 : 0;
    }
};

// A running softmax of one query: the largest score so far, and sums of exponentials relative to it, for each lane.
struct Running {
    float top = HIDDEN;
    floats total = {};
    int64_t from, to;  // positions that the query sees, both inclusive

    // A score that comes before all keys' and has no value.
    void begin_with(float sink) { top = sink, total[0] = 1; }

    // Turns scores of the block at `begin` into weights, and rescales earlier sums to the new largest score.
    void weigh(floats* x, int64_t begin, float softcap, float* acc, int d) {
        if (softcap != 0)
            for (int i = 0; i < BLOCK; ++i) x[i / LANES][i % LANES] = std::tanh(x[i / LANES][i % LANES] / softcap) * softcap;
        if (begin + BLOCK - 1 > to || begin < from)
            for (int i = 0; i < BLOCK; ++i)
                if (begin + i > to || begin + i < from) x[i / LANES][i % LANES] = HIDDEN;
        floats highest = x[0];
        for (int t = 1; t < TILES; ++t) highest = x[t] > highest ? x[t] : highest;
        const float largest = max(highest);
        if (largest > top) {
            const float shrink = exp(splat(top - largest))[0];
            total *= shrink;
            for (int j = 0; j < d; j += LANES) store(acc + j, load(acc + j) * shrink);
            top = largest;
        }
        for (int t = 0; t < TILES; ++t) total += x[t] = exp(x[t] - top);
    }
};

// A pass of one head over a block of keys.
struct Visit {
    const Shape& s;
    int64_t begin;
    int end;  // end of the queries that may see it
    Running* running;
    float* acc;  // [queries, d]

    bool sees(int n) const { return n < end && begin <= running[n].to && begin + BLOCK > running[n].from; }
    void weigh(int n, floats* x) const { running[n].weigh(x, begin, s.softcap, acc + size_t(n) * s.d, s.d); }
};

template <int N, class P>
int meet(const P& products, int first, const Visit& visit) {
    floats x[N][TILES];
    products.template scores<N>(first, visit.s.d, x);
    for (int n = 0; n < N; ++n) visit.weigh(first + n, x[n]);
    products.template add<N>(x, visit.s.d, visit.acc + size_t(first) * visit.s.d);
    return N;
}

// Runs the queries from `first` on that share the block. Returns their number, including queries that do not see it.
template <class P>
int meet_next(const P& products, int first, const Visit& visit) {
    auto see = [&](int n) { return visit.sees(first + n); };
    if (!see(0)) return 1;
    return see(1) && see(2) && see(3) ? meet<4>(products, first, visit) : meet<1>(products, first, visit);
}

#if defined(SOOTHSAY_TILES)
int meet_next(const Tiles& tiles, int first, const Visit& visit) {
    const int d = visit.s.d;
    bool any = false, sees[TILE_ROWS];
    for (int n = 0; n < tiles.height; ++n) any |= sees[n] = visit.sees(first + n);
    if (!any) return tiles.height;
    floats x[TILE_ROWS][TILES];
    alignas(64) uint32_t w[TILE_ROWS][BLOCK / 2] = {};
    tiles.scores(first, d, x);
    for (int n = 0; n < tiles.height; ++n)
        if (sees[n]) visit.weigh(first + n, x[n]), tiles.round(x[n], w[n]);
    for (int j = 0; j < d; j += BLOCK) {
        tiles.weighted(w, j, x);
        for (int n = 0; n < tiles.height; ++n) {
            float* acc = visit.acc + size_t(first + n) * d + j;
            for (int t = 0; sees[n] && t < TILES && j + t * LANES < d; ++t)
                store(acc + t * LANES, load(acc + t * LANES) + x[n][t]);
        }
    }
    return tiles.height;
}
#endif

// A family: consecutive paths that begin with the same keys, and their parameters.
struct Family {
    const int64_t *keys, *key_begin, *rows, *positions, *row_begin, *shared;
    int begin, end;  // paths

    // Number of whole blocks of keys that all paths share.
    int64_t common() const {
        int64_t least = end - begin > 1 ? INT64_MAX : 0;
        for (int path = begin + 1; path < end; ++path) least = shared[path] < least ? shared[path] : least;
        return least / BLOCK;
    }
};

// Rows [row, row + count) of a family, one key head.
template <class T>
void attend_tile(const float* q, const T* kv, const Family& family, int64_t row, int count, int head, const Shape& s,
                 float* out) {
    const int d = s.d, queries = count * s.group;
    const int64_t row_size = int64_t(s.heads) * s.group * d;
    const int64_t *rows = family.rows + row, *positions = family.positions + row;
    const T* k_base = kv + int64_t(head) * s.slots * d;
    const T* v_base = kv + int64_t(s.values + head) * s.slots * d;
    typename Products<T>::type products(queries, d);
    std::vector<float> acc(size_t(queries) * d, 0.0f);
    std::vector<Running> running(queries);
    for (int n = 0; n < queries; ++n) {
        const int r = n / s.group, query = head * s.group + n % s.group;
        products.set_query(n, q + rows[r] * row_size + int64_t(query) * d, d);
        if (s.sinks) running[n].begin_with(s.sinks[query]);
        running[n].to = positions[r];
        running[n].from = s.first_seen(positions[r]);
    }
    // Runs queries [first, end) on the blocks [block, stop) of a path, as far as they see them.
    auto meet_path = [&](int path, int first, int end, int64_t block, int64_t stop) {
        const int64_t* keys = family.keys + family.key_begin[path];
        int64_t from = INT64_MAX, last = 0;
        for (int n = first; n < end; ++n) {
            from = running[n].from < from ? running[n].from : from;
            last = running[n].to > last ? running[n].to : last;
        }
        block = from / BLOCK > block ? from / BLOCK : block;
        for (; block < stop && block * BLOCK <= last; ++block) {
            const T *k[BLOCK], *v[BLOCK];
            for (int i = 0; i < BLOCK; ++i) {  // after the last key any slot will do, it is masked
                const int64_t at = block * BLOCK + i, slot = keys[at <= last ? at : last];
                k[i] = k_base + slot * d;
                v[i] = v_base + slot * d;
            }
            products.set_block(k, v, d);
            const Visit visit{s, block * BLOCK, end, running.data(), acc.data()};
            for (int n = first; n < end;) n += meet_next(products, n, visit);
        }
    };
    const int64_t common = family.common();
    meet_path(family.begin, 0, queries, 0, common);
    for (int path = family.begin; path < family.end; ++path) {
        const int64_t first = std::max(family.row_begin[path] - row, int64_t(0));
        const int64_t end = std::min(family.row_begin[path + 1] - row, int64_t(count));
        if (first < end) meet_path(path, int(first) * s.group, int(end) * s.group, common, INT64_MAX);
    }
    for (int n = 0; n < queries; ++n) {
        float* o = out + rows[n / s.group] * row_size + (int64_t(head) * s.group + n % s.group) * d;
        const float total = sum(running[n].total);
        for (int j = 0; j < d; j += LANES) store(o + j, load(&acc[size_t(n) * d + j]) / total);
    }
}

template <class T>
void attend(const float* q, const T* kv, Family family, int num_paths, const Shape& s, float* out) {
    const int step = TOGETHER / s.group > 0 ? TOGETHER / s.group : 1;
    struct Task {
        Family family;
        int64_t row;
        int head;
    };
    std::vector<Task> tasks;
    for (int head = 0; head < s.heads; ++head)
        for (family.begin = 0; family.begin < num_paths; family.begin = family.end) {
            family.end = family.begin + 1;
            while (family.end < num_paths && family.shared[family.end]) ++family.end;
            for (int64_t row = family.row_begin[family.begin]; row < family.row_begin[family.end]; row += step)
                tasks.push_back({family, row, head});
        }
    parallel(int64_t(tasks.size()), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const Task& t = tasks[i];
            const int64_t left = t.family.row_begin[t.family.end] - t.row;
            attend_tile(q, kv, t.family, t.row, int(left < step ? left : step), t.head, s, out);
        }
    });
}

}  // namespace

extern "C" void soothsay_attend(const float* q, const void* kv, int is_bf16, const int64_t* keys, const int64_t* key_begin,
                                const int64_t* rows, const int64_t* positions, const int64_t* row_begin,
                                const int64_t* shared, int num_paths, int heads, int values, int group, int d,
                                int64_t slots, float softcap, int64_t window, const float* sinks, float* out) {
    const Shape s{heads, values, group, d, slots, softcap, window, sinks};
    const Family all{keys, key_begin, rows, positions, row_begin, shared, 0, 0};
    if (is_bf16) attend(q, (const bf16*)kv, all, num_paths, s, out);
    else attend(q, (const float*)kv, all, num_paths, s, out);
}
