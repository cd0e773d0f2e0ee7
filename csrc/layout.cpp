// Lays out the rows of a pass: where keys and values go, and which keys each row attends to. The twin of `LayoutOps`.
#include "kernels.h"
#include "pool.h"
#include <algorithm>
#include <cstring>
#include <vector>

namespace {

// One request of a plan; see kernels.h.
struct Request {
    int64_t start, first_key, first, size, pending;
    const int64_t *tokens, *table, *node_tokens, *parents;

    // Reads a request at `plan`, and moves that to the next one.
    explicit Request(const int64_t*& plan)
        : start(plan[0]), first_key(plan[1]), first(plan[2]), size(plan[3]), pending(plan[4]), tokens(plan + 6),
          table(plan[5] < 0 ? nullptr : tokens + pending), node_tokens(tokens + pending + std::max<int64_t>(plan[5], 0)),
          parents(node_tokens + size) {
        plan = parents + size;
    }

    int64_t context() const { return start + pending - 1; }  // the root's offset
    int64_t new_nodes() const { return std::max<int64_t>(size - first, 0); }
};

struct Layout {
    const soothsay_layout out;
    const int64_t block_size;
    int64_t rows = 0, logit_rows = 0, path_rows = 0, keys = 0, paths = 0, slots = 0;
    std::vector<int64_t> depths, path;
    std::vector<char> has_children;

    int64_t slot(const Request& r, int64_t base, int64_t offset) {
        if (!r.table) return base + offset;
        return r.table[offset / block_size] * block_size + offset % block_size;
    }

    void add_row(int64_t token, int64_t position, int64_t at) {
        out.tokens[rows] = token, out.positions[rows] = position, out.slots[rows] = at;
        ++rows;
    }

    // Appends the slots of consecutive offsets to the keys, without a division for each.
    void add_keys(const Request& r, int64_t base, int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t at = slot(r, base, begin);
            const int64_t count = r.table ? std::min(end - begin, block_size - begin % block_size) : end - begin;
            for (int64_t i = 0; i < count; ++i) out.keys[keys++] = at + i;
            begin += count, slots = std::max(slots, at + count);
        }
    }

    void add_path_row(const Request& r, int64_t row) {
        out.rows[path_rows] = row, out.row_positions[path_rows] = out.positions[row] - r.first_key;
        ++path_rows;
    }

    void end_path(int64_t shared) {
        out.shared[paths++] = shared;
        out.key_begin[paths] = keys, out.row_begin[paths] = path_rows;
    }

    void add(const Request& r) {
        const int64_t base = rows, context = r.context();
        for (int64_t i = 0; i < r.pending; ++i) add_row(r.tokens[i], r.start + i, slot(r, base, r.start + i));
        depths.assign(std::max<int64_t>(r.size, 1), 0);
        has_children.assign(depths.size(), 0);
        for (int64_t node = 1; node < r.size; ++node) {
            depths[node] = depths[r.parents[node]] + 1;
            has_children[r.parents[node]] = 1;
            if (node >= r.first) add_row(r.node_tokens[node], context + depths[node], slot(r, base, context + node));
        }
        if (r.size && rows > base)
            for (int64_t row = base + std::max<int64_t>(r.pending - 1, 0); row < rows; ++row) out.logit_rows[logit_rows++] = row;
        if (rows == base) return;
        if (r.size <= *std::max_element(depths.begin(), depths.end()) + 1) add_chain(r, base);
        else add_tree(r, base);
    }

    void add_chain(const Request& r, int64_t base) {
        for (int64_t row = base; row < rows; ++row) add_path_row(r, row);
        add_keys(r, base, r.first_key, out.positions[rows - 1] + 1);
        end_path(0);
    }

    // A path for each leaf. A node on several paths is a row of the first one.
    void add_tree(const Request& r, int64_t base) {
        const int64_t context = r.context(), seen = context - r.first_key + 1, before = paths;
        std::vector<char> placed(r.size);
        for (int64_t node = 0; node < r.size; ++node) placed[node] = node < r.first;
        bool led = false;  // whether the pending tokens have their path
        int64_t first_keys = 0;
        for (int64_t node = 1; node < r.size; ++node) slots = std::max(slots, slot(r, base, context + node) + 1);
        for (int64_t leaf = 0; leaf < r.size; ++leaf) {
            if (has_children[leaf]) continue;
            path.clear();
            for (int64_t node = leaf; node > 0; node = r.parents[node]) path.push_back(node);
            const int64_t begun = path_rows;
            for (int64_t i = 0; !led && i < r.pending; ++i) add_path_row(r, base + i);
            led = true;
            for (size_t i = path.size(); i--;)
                if (!placed[path[i]]) placed[path[i]] = 1, add_path_row(r, base + r.pending + path[i] - r.first);
            if (path_rows == begun) continue;
            if (paths == before) {
                first_keys = keys;
                add_keys(r, base, r.first_key, context + 1);
            } else {
                std::copy(out.keys + first_keys, out.keys + first_keys + seen, out.keys + keys);
                keys += seen;
            }
            for (size_t i = path.size(); i--;) out.keys[keys++] = slot(r, base, context + path[i]);
            end_path(paths == before ? 0 : seen);
        }
    }
};

}  // namespace

extern "C" void soothsay_lay_out(const int64_t* plan, int64_t count, int64_t block_size, int64_t N, int64_t M, int64_t* out) {
    Layout layout{soothsay_layout(out, N, M), block_size};
    layout.out.key_begin[0] = layout.out.row_begin[0] = 0;
    for (int64_t i = 0; i < count; ++i) layout.add(Request(plan));
    layout.out.totals[0] = layout.paths, layout.out.totals[1] = layout.slots;
}

extern "C" void soothsay_move(void* memory, int64_t planes, int64_t slots, int64_t size, const int64_t* places,
                              int64_t count) {
    constexpr int64_t AHEAD = 16;    // copies: rows lie far apart, and each would be waited for
    constexpr int64_t ALONE = 2048;  // copies; for fewer, waking a thread costs more than the work
    const int64_t plane = slots * size;
    parallel(planes, std::max<int64_t>(ALONE / count, 32), [&](int64_t begin, int64_t end) {
        char *at = (char*)memory + begin * plane, *soon = at, *const last = (char*)memory + end * plane;
        int64_t next = 0;
        auto prefetch = [&] {
            for (int64_t n = 0; n < size && soon < last; n += 64) {
                __builtin_prefetch(soon + places[next] * size + n);
                __builtin_prefetch(soon + places[count + next] * size + n, 1);
            }
            if (++next == count) next = 0, soon += plane;
        };
        for (int64_t i = 0; i < AHEAD; ++i) prefetch();
        for (; at < last; at += plane)
            for (int64_t i = 0; i < count; ++i, prefetch())
                std::memcpy(at + places[count + i] * size, at + places[i] * size, size);
    });
}
