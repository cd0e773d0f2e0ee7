// Attention of each row to its own path of keys, read from the KV pool in place.
//
// A row reads its keys in order of position, in blocks of BLOCK counted from position 0, with a running softmax over
// the blocks (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). Its result depends on
// its query and its own keys alone, so its bits are the same in any batch, tree or chunk, with any number of threads.
// The paths of a tree read their common context together, and then the rest of their keys separately.
#include "kernels.h"
#include "kv_formats.h"
#include "pool.h"
#include <algorithm>
#include <vector>

namespace {

#if defined(SOOTHSAY_TILES)
constexpr int TOGETHER = 128;  // approximate number of queries that share a pass over the keys
#else
constexpr int TOGETHER = 64;
#endif
constexpr float HIDDEN = -1e30f;

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
            for (int t = 0; t < TILES; ++t) x[t] = capped(x[t], softcap);
        if (begin + BLOCK - 1 > to || begin < from) {
            const int first = int(std::max(from - begin, int64_t(0))), last = int(std::min(to - begin, int64_t(BLOCK)));
            for (int t = 0; t < TILES; ++t) x[t] = hidden(x[t], t * LANES, first, last);
        }
        floats highest = x[0];
        for (int t = 1; t < TILES; ++t) highest = x[t] > highest ? x[t] : highest;
        const float largest = max(highest);
        if (largest > top) {
            const float shrink = exp(splat(top - largest))[0];
            total *= shrink;
            for (int j = 0; j < d; j += LANES) store(acc + j, load(acc + j) * shrink);
            top = largest;
        }
        floats all = total;
        for (int t = 0; t < TILES; ++t) all += x[t] = exp(x[t] - top);
        total = all;
    }

    static floats capped(floats x, float softcap) {
        for (int i = 0; i < LANES; ++i) x[i] = std::tanh(x[i] / softcap) * softcap;
        return x;
    }

    // Hides the scores of keys before `first` and after `last`. x has those of keys from `key` on.
    static floats hidden(floats x, int key, int first, int last) {
        ints keys;
        for (int i = 0; i < LANES; ++i) keys[i] = key + i;
        return (keys < first) | (keys > last) ? splat(HIDDEN) : x;
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
template <class Keys>
int meet_next(const Tiles<Keys>& tiles, int first, const Visit& visit) {
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

// Fetches `size` bytes into the second cache.
inline void prefetch(const void* row, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch((const char*)row + i, 0, 2);
}

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
template <class Format>
void attend_tile(const float* q, const void* kv, const Family& family, int64_t row, int count, int head, const Shape& s,
                 float* out) {
    typedef typename Format::Key Key;
    typedef typename Format::Value Value;
    const int d = s.d, queries = count * s.group;
    const int64_t stride = Format::stride(d), head_size = s.slots * stride;
    const int64_t row_size = int64_t(s.heads) * s.group * d;
    const int64_t *rows = family.rows + row, *positions = family.positions + row;
    const Key* k_base = (const Key*)kv + head * head_size;
    const Value* v_base = (const Value*)kv + (s.values + head) * head_size;
    typename Format::Products products(queries, d);
    std::vector<float> acc(size_t(queries) * d, 0.0f);
    std::vector<Running> running(queries);
    for (int r = 0; r < count; ++r) prefetch(q + rows[r] * row_size + int64_t(head) * s.group * d, 4 * s.group * d);
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
            const Key* k[BLOCK];
            const Value* v[BLOCK];
            for (int i = 0; i < BLOCK; ++i) {  // after the last key any slot will do, it is masked
                const int64_t at = block * BLOCK + i, slot = keys[at <= last ? at : last];
                k[i] = k_base + slot * stride;
                v[i] = v_base + slot * stride;
            }
            products.set_keys(k, d);
            products.set_values(v, d);
            for (int64_t at = (block + 1) * BLOCK; at < (block + 2) * BLOCK && at <= last; ++at) {
                prefetch(k_base + keys[at] * stride, stride * sizeof(Key));
                prefetch(v_base + keys[at] * stride, stride * sizeof(Value));
            }
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

template <class Format>
void attend(const float* q, const void* kv, Family family, int num_paths, const Shape& s, float* out) {
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
            attend_tile<Format>(q, kv, t.family, t.row, int(left < step ? left : step), t.head, s, out);
        }
    });
}

}  // namespace

extern "C" void soothsay_attend(const float* q, const void* kv, int format, const int64_t* keys, const int64_t* key_begin,
                                const int64_t* rows, const int64_t* positions, const int64_t* row_begin,
                                const int64_t* shared, int num_paths, int heads, int values, int group, int d,
                                int64_t slots, float softcap, int64_t window, const float* sinks, float* out) {
    const Shape s{heads, values, group, d, slots, softcap, window, sinks};
    const Family all{keys, key_begin, rows, positions, row_begin, shared, 0, 0};
    if (format == SOOTHSAY_INT16_KEYS) attend<IntegerFormat>(q, kv, all, num_paths, s, out);
    else if (format == SOOTHSAY_BF16) attend<HalfFormat>(q, kv, all, num_paths, s, out);
    else attend<FloatFormat>(q, kv, all, num_paths, s, out);
}
