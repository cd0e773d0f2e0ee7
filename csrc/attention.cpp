// Attention of each row to its own path of keys, read from the KV pool in place.
//
// A row reads its keys in order of position, in blocks of BLOCK counted from position 0, with a running softmax over
// the blocks (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). Each STRETCH of keys has
// sums of its own, which are joined in order, so that threads can share a long context (Dao et al. 2023, "Flash-Decoding").
// A row's result depends on its query and its own keys alone, so its bits are the same in any batch, tree or chunk, with
// any number of threads. The paths of a tree read their common context together, and then the rest of their keys separately.
#include "operations.h"
#include "kv_formats.h"
#include "pool.h"
#include "running_softmax.h"
#include <algorithm>
#include <optional>
#include <vector>

namespace {

#if defined(SOOTHSAY_TILES)
constexpr int TOGETHER = 128;  // approximate number of queries that share a pass over the keys
#else
constexpr int TOGETHER = 64;
#endif
constexpr int64_t STRETCH = 512 / BLOCK;  // blocks
constexpr int64_t MANY = 4;               // tasks for each thread: from there on, each is one piece of work
constexpr int64_t JOINS = 1024;           // of a query's sums, that are worth a piece
constexpr int64_t MOST = 1 << 21;         // floats of sums that wait to be joined, about

struct Shape {
    int heads;             // of keys
    int values;            // the number of the first head of values: 0 if keys are the values too
    int group, d;          // query heads of each key head, dimensions (a multiple of 32)
    int64_t slots;         // of the pool
    float softcap;         // 0: none
    int64_t window;        // 0: none; see kernels.h
    const float* sinks;    // [heads * group], or null
    ByDistance relative;   // of the first query head
    const int64_t* places; // [N], the positions of the rows

    int64_t first_seen(int64_t position) const {
        if (window < 0) return position / -window * -window;
        return window && position >= window ? position - window + 1 : 0;
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
    template <class Values>
    void weigh(int n, floats* x) const { running[n].weigh<Values>(x, begin, s.softcap, acc + size_t(n) * s.d, s.d); }
};

template <int N, class P>
int meet(const P& products, int first, const Visit& visit) {
    floats x[N][TILES];
    products.template scores<N>(first, visit.s.d, x);
    for (int n = 0; n < N; ++n) visit.template weigh<P>(first + n, x[n]);
    products.template add<N>(x, visit.s.d, visit.acc + size_t(first) * visit.s.d);
    return N;
}

// Runs the queries from `first` on that share the block. Returns their number, including queries that do not see it.
template <class P>
int meet_next(const P& products, int first, const Visit& visit) {
    int count = 0;
    while (count < 4 && visit.sees(first + count)) ++count;
    if (count == 4) return meet<4>(products, first, visit);
    if (count == 3) return meet<3>(products, first, visit);
    if (count == 2) return meet<2>(products, first, visit);
    return count ? meet<1>(products, first, visit) : 1;
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
        if (sees[n]) visit.weigh<Tiles<Keys>>(first + n, x[n]), tiles.round(x[n], w[n]);
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

// A family: consecutive paths that begin with the same keys.
struct Family : soothsay_sight {
    int begin, end;  // paths

    // Number of whole blocks of keys that all paths share.
    int64_t common() const {
        int64_t least = end - begin > 1 ? INT64_MAX : 0;
        for (int path = begin + 1; path < end; ++path) least = shared[path] < least ? shared[path] : least;
        return least / BLOCK;
    }
};

inline int64_t stretch_of(int64_t position) { return position / (STRETCH * BLOCK); }

// Rows [row, row + count) of a family, one key head.
struct Task {
    Family family;
    int64_t row;
    int count, head;

    const int64_t* rows() const { return family.rows + row; }
    const int64_t* positions() const { return family.positions + row; }

    // The stretches of keys that some row sees: [begin, end).
    int64_t begin(const Shape& s) const {
        return stretch_of(s.first_seen(*std::min_element(positions(), positions() + count)));
    }
    int64_t end() const { return stretch_of(*std::max_element(positions(), positions() + count)) + 1; }
};

// Sums of a task's queries over a stretch of keys.
struct Sums {
    std::vector<Running> running;
    std::vector<float> acc;  // [queries, d]

    Sums(const Task& task, int64_t stretch, const Shape& s) : running(task.count * s.group), acc(running.size() * s.d) {
        for (size_t n = 0; n < running.size(); ++n) {
            const int64_t position = task.positions()[n / s.group];
            running[n].from = s.first_seen(position), running[n].to = position;
            const int64_t head = task.head * s.group + n % s.group;
            if (s.sinks && stretch == stretch_of(running[n].from)) running[n].begin_with(s.sinks[head]);
            if (s.relative.numbers) running[n].added = s.relative.at(head, s.places[task.rows()[n / s.group]]);
        }
    }

    void join(const Sums& next, int d) {
        for (size_t n = 0; n < running.size(); ++n) running[n].join(next.running[n], &acc[n * d], &next.acc[n * d], d);
    }
};

// The queries and keys of a task.
template <class Format>
class Meeting {
    typedef typename Format::Key Key;
    typedef typename Format::Value Value;
    const Task& task;
    const Shape& s;
    const int64_t stride;
    const Key* k_base;
    const Value* v_base;
    typename Format::Products products;

    // Runs queries [first, end) on the blocks [block, stop) of a path, as far as they see them.
    void meet_path(int path, int first, int end, int64_t block, int64_t stop, Sums& sums) {
        const int64_t* keys = task.family.keys + task.family.key_begin[path];
        int64_t from = INT64_MAX, last = 0;
        for (int n = first; n < end; ++n) {
            from = std::min(from, sums.running[n].from);
            last = std::max(last, sums.running[n].to);
        }
        for (block = std::max(block, from / BLOCK); block < stop && block * BLOCK <= last; ++block) {
            const Key* k[BLOCK];
            const Value* v[BLOCK];
            for (int i = 0; i < BLOCK; ++i) {  // after the last key any slot will do, it is masked
                const int64_t at = block * BLOCK + i, slot = keys[at <= last ? at : last];
                k[i] = k_base + slot * stride;
                v[i] = v_base + slot * stride;
            }
            products.set_keys(k, s.d);
            products.set_values(v, s.d);
            for (int64_t at = (block + 1) * BLOCK; at < (block + 2) * BLOCK && at <= last; ++at) {
                prefetch(k_base + keys[at] * stride, stride * sizeof(Key));
                prefetch(v_base + keys[at] * stride, stride * sizeof(Value));
            }
            const Visit visit{s, block * BLOCK, end, sums.running.data(), sums.acc.data()};
            for (int n = first; n < end;) n += meet_next(products, n, visit);
        }
    }

  public:
    Meeting(const Task& t, const float* q, const void* kv, const Shape& shape)
        : task(t), s(shape), stride(Format::stride(s.d)), k_base((const Key*)kv + t.head * s.slots * stride),
          v_base((const Value*)kv + (s.values + t.head) * s.slots * stride), products(t.count * s.group, s.d) {
        const int64_t size = s.group * s.d;  // of a row's queries
        auto queries = [&](int r) { return q + (t.rows()[r] * s.heads + t.head) * size; };
        for (int r = 0; r < t.count; ++r) prefetch(queries(r), 4 * size);
        for (int n = 0; n < t.count * s.group; ++n) products.set_query(n, queries(n / s.group) + n % s.group * s.d, s.d);
    }

    Sums meet(int64_t stretch) {
        Sums sums(task, stretch, s);
        const Family& family = task.family;
        const int64_t begin = stretch * STRETCH, stop = begin + STRETCH, common = family.common();
        meet_path(family.begin, 0, task.count * s.group, begin, std::min(common, stop), sums);
        for (int path = family.begin; path < family.end; ++path) {
            const int64_t first = std::max(family.row_begin[path] - task.row, int64_t(0));
            const int64_t end = std::min(family.row_begin[path + 1] - task.row, int64_t(task.count));
            if (first < end) meet_path(path, int(first) * s.group, int(end) * s.group, std::max(common, begin), stop, sums);
        }
        return sums;
    }
};

// Joins the sums over a stretch to those before it, if there are any.
void join(std::optional<Sums>& sums, Sums&& next, int d) {
    if (sums) sums->join(next, d);
    else sums = std::move(next);
}

void write(const Task& task, const Shape& s, const Sums& sums, float* out) {
    for (size_t n = 0; n < sums.running.size(); ++n) {
        float* o = out + ((task.rows()[n / s.group] * s.heads + task.head) * s.group + n % s.group) * s.d;
        const float total = sum(sums.running[n].total);
        for (int j = 0; j < s.d; j += LANES) store(o + j, load(&sums.acc[n * s.d + j]) / total);
    }
}

template <class Format>
void attend_alone(const Task& task, const float* q, const void* kv, const Shape& s, float* out) {
    Meeting<Format> meeting(task, q, kv, s);
    std::optional<Sums> sums;
    for (int64_t stretch = task.begin(s); stretch < task.end(); ++stretch) join(sums, meeting.meet(stretch), s.d);
    write(task, s, *sums, out);
}

// Threads share the stretches of each task, at most `most` of them at a time.
template <class Format>
void attend_together(const std::vector<Task>& tasks, int64_t most, const float* q, const void* kv, const Shape& s, float* out) {
    const int64_t count = int64_t(tasks.size());
    int64_t begin = INT64_MAX, end = 0;
    for (const Task& task : tasks) begin = std::min(begin, task.begin(s)), end = std::max(end, task.end());
    most = std::min(most, end - begin);
    std::vector<std::optional<Sums>> sums(count), parts(count * most);
    for (; begin < end; begin += most) {
        parallel(count * most, std::max(int64_t(1), count * most / (MANY * pool_threads())), [&](int64_t first, int64_t last) {
            std::optional<Meeting<Format>> meeting;
            for (int64_t i = first; i < last; ++i) {
                const Task& task = tasks[i / most];
                const int64_t stretch = begin + i % most;
                if (i % most == 0) meeting.reset();  // another task begins
                if (stretch < task.begin(s) || stretch >= task.end()) continue;
                if (!meeting) meeting.emplace(task, q, kv, s);
                parts[i] = meeting->meet(stretch);
            }
        });
        parallel(count, 1 + JOINS / (most * tasks[0].count * s.group), [&](int64_t first, int64_t last) {
            for (int64_t i = first * most; i < last * most; ++i)
                if (parts[i]) join(sums[i / most], std::move(*parts[i]), s.d), parts[i].reset();
        });
    }
    parallel(count, 1 + JOINS / (tasks[0].count * s.group), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) write(tasks[i], s, *sums[i], out);
    });
}

template <class Format>
void attend(const float* q, const void* kv, Family family, const Shape& s, float* out) {
    const int step = TOGETHER / s.group > 0 ? TOGETHER / s.group : 1;
    std::vector<Task> tasks;
    bool is_long = false;
    int64_t size = 0;  // floats of all sums
    for (int head = 0; head < s.heads; ++head)
        for (family.begin = 0; family.begin < family.count; family.begin = family.end) {
            family.end = family.begin + 1;
            while (family.end < family.count && family.shared[family.end]) ++family.end;
            const int64_t end = family.row_begin[family.end];
            for (int64_t row = family.row_begin[family.begin]; row < end; row += step) {
                const Task task{family, row, int(std::min(end - row, int64_t(step))), head};
                is_long |= task.end() - task.begin(s) > 1, size += int64_t(task.count) * s.group * s.d;
                tasks.push_back(task);
            }
        }
    const int64_t count = int64_t(tasks.size()), threads = pool_threads();
    if (is_long && threads > 1 && count < MANY * threads)
        return attend_together<Format>(tasks, std::max(int64_t(2), MOST / size), q, kv, s, out);
    parallel(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) attend_alone<Format>(tasks[i], q, kv, s, out);
    });
}

}  // namespace

extern "C" void soothsay_attend(const float* q, const void* kv, int format, const soothsay_sight* sight, int heads, int values, int group,
                                int d, int64_t slots, float softcap, int64_t window, const float* sinks, const float* relative,
                                int64_t most, const int64_t* positions, float* out) {
    const Shape s{heads, values, group, d, slots, softcap, window, sinks, {relative, most}, positions};
    const Family all{*sight, 0, 0};
    if (format == SOOTHSAY_INT16_KEYS) attend<IntegerFormat>(q, kv, all, s, out);
    else if (format == SOOTHSAY_INT8) attend<ByteFormat>(q, kv, all, s, out);
    else if (format == SOOTHSAY_BF16) attend<HalfFormat>(q, kv, all, s, out);
    else attend<FloatFormat>(q, kv, all, s, out);
}
