// A mixture of experts: rows are sorted by expert, and each chosen expert's weights are read once.
#include "operations.h"
#include "activations.h"
#include "pool.h"
#include "products.h"
#include "simd.h"
#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr int64_t PIECE = 1 << 13;  // elements; for fewer, sharing costs more than the work

// Marks the `most` largest of `count` numbers, the first of equal ones, and passes each place on, the largest first.
template <class Found>
void take_best(const float* numbers, int count, int most, std::vector<char>& taken, Found found) {
    std::fill_n(taken.begin(), count, 0);
    for (int k = 0; k < most; ++k) {
        int best = -1;
        for (int i = 0; i < count; ++i)
            if (!taken[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
        if (best < 0) return;  // all are taken
        taken[best] = 1;
        found(k, best);
    }
}

// Memory to route a row.
struct Router {
    const soothsay_routing& r;
    std::vector<float> weights, worth, groups;
    std::vector<char> taken, kept;

    explicit Router(const soothsay_routing& routing)
        : r(routing), weights(r.count), worth(r.count), groups(r.groups), taken(r.count), kept(r.groups) {}

    // Numbers of experts outside the best groups become minus infinity.
    void keep_groups() {
        const int size = r.count / r.groups;
        for (int g = 0; g < r.groups; ++g) {
            const float* own = &worth[g * size];
            groups[g] = 0;
            take_best(own, size, r.best, taken, [&](int, int place) { groups[g] += own[place]; });
        }
        take_best(groups.data(), r.groups, r.kept, kept, [](int, int) {});
        for (int i = 0; i < r.count; ++i)
            if (!kept[i / size]) worth[i] = -INFINITY;
    }

    // The share of an expert among those that are left and not far below it.
    void mix_sparsely(float* shares, int64_t* chosen) {
        worth = weights;
        take_best(weights.data(), r.count, r.each, taken, [&](int k, int place) {
            const float top = weights[place];
            float total = 0;
            for (float left : worth)
                if (!((top - left) / std::max(std::fabs(left), top) > r.within)) total += std::exp(left - top);
            chosen[k] = place, shares[k] = 1 / total, worth[place] = -INFINITY;
        });
    }

    template <class T>
    void route(const T* scores, float* shares, int64_t* chosen) {
        float top = -INFINITY, total = 0;
        for (int i = 0; i < r.count; ++i) weights[i] = widen(scores[i]), top = std::max(top, weights[i]);
        if (r.within >= 0) return mix_sparsely(shares, chosen);
        for (float& w : weights) {
            w = r.sigmoid ? 1 / (1 + std::exp(-w)) : std::exp(w - top);
            total += w;
        }
        for (int i = 0; i < r.count; ++i) {
            if (!r.sigmoid) weights[i] /= total;
            worth[i] = r.correction ? weights[i] + r.correction[i] : weights[i];
        }
        if (r.groups > 1) keep_groups();
        float sum = 0;
        take_best(worth.data(), r.count, r.each, taken, [&](int k, int place) {
            chosen[k] = place, shares[k] = weights[place], sum += shares[k];
        });
        for (int k = 0; k < r.each; ++k) {
            shares[k] = (r.normalize ? shares[k] / (sum + 1e-20f) : shares[k]) * r.scale;
            if (r.scales) shares[k] *= r.scales[chosen[k]];
        }
    }
};

// The rows of each expert, one expert after the other.
struct Sorted {
    std::vector<int64_t> begin;   // [experts + 1]
    std::vector<int64_t> rows;    // [rows * each], sorted by expert
    std::vector<int64_t> places;  // [rows, each]: where in `rows` a row is for each of its experts

    Sorted(const std::vector<int64_t>& chosen, int each, int experts)
        : begin(experts + 1), rows(chosen.size()), places(chosen.size()) {
        for (int64_t expert : chosen) ++begin[expert + 1];
        for (int e = 0; e < experts; ++e) begin[e + 1] += begin[e];
        std::vector<int64_t> next(begin);
        for (size_t i = 0; i < chosen.size(); ++i) rows[places[i] = next[chosen[i]]++] = int64_t(i) / each;
    }
};

// Each row times its shares, sorted by expert: [rows * each, n].
template <class T>
std::unique_ptr<float[]> scaled(const T* x, const Sorted& sorted, const float* shares, int64_t rows, int each, int n) {
    std::unique_ptr<float[]> out(new float[rows * each * n]);
    for (int64_t i = 0; i < rows * each; ++i)
        for (int j = 0; j < n; j += LANES)
            store(&out[sorted.places[i] * n + j], load(x + i / each * n + j) * splat(shares[i]));
    return out;
}

// out [rows, n]: the sum of each row's experts' outputs times their shares, in order of rank, and of the shared expert's.
template <class T>
void add_up(const T* outputs, const T* shared, const Sorted& sorted, const float* shares, int64_t rows, int each, int n,
            float* out) {
    parallel(rows, PIECE / (int64_t(n) * each), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            for (int j = 0; j < n; j += LANES) {
                floats total = {};
                for (int64_t i = r * each; i < (r + 1) * each; ++i) {
                    const floats part = load(outputs + sorted.places[i] * n + j) * splat(shares[i]);
                    total = i > r * each ? total + part : part;
                }
                store(out + r * n + j, shared ? total + load(shared + r * n + j) : total);
            }
    });
}

template <class T>
void mix(const Rows& x, const soothsay_mixture& m, const float* scores, float* out) {
    const soothsay_routing& routing = m.routing;
    const soothsay_expert* last = m.experts + routing.count - 1;
    const int hidden = last->gate_up->inputs, size = last->down->inputs, each = routing.each, width = parts(m.activation);
    const int beside = m.shared ? m.shared->down->inputs : 0;
    const int64_t rows = x.count, all = rows * each;
    const bool is_bf16 = sizeof(T) == sizeof(bf16);

    std::vector<float> shares(all);
    std::vector<int64_t> chosen(all);
    if (scores)
        soothsay_route(scores, 0, rows, &routing, shares.data(), chosen.data());
    else {
        const std::unique_ptr<T[]> own(new T[rows * routing.count]);
        soothsay_linear(x.data, x.are_bf16, rows, m.router, own.get(), is_bf16);
        soothsay_route(own.get(), is_bf16, rows, &routing, shares.data(), chosen.data());
    }
    const Sorted sorted(chosen, each, routing.count);
    std::unique_ptr<float[]> own_inputs;
    if (routing.scales_inputs) {
        own_inputs = x.are_bf16 ? scaled((const bf16*)x.data, sorted, shares.data(), rows, each, hidden)
                                : scaled((const float*)x.data, sorted, shares.data(), rows, each, hidden);
        std::fill(shares.begin(), shares.end(), 1.0f);
    }

    // Outputs of the experts' rows, and after them of the shared expert's.
    const std::unique_ptr<T[]> wide(new T[std::max(width * (all * size + rows * beside), (all + rows) * hidden)]);
    const std::unique_ptr<T[]> inner(new T[all * size + rows * beside]);
    Products up, down;
    *m.ran = 0;
    for (int e = 0; e < routing.count; ++e) {
        const int64_t first = sorted.begin[e], count = sorted.begin[e + 1] - first;
        *m.ran += count > 0;
        const Rows own = own_inputs ? Rows{&own_inputs[first * hidden], 0, count} : Rows{x.data, x.are_bf16, count, &sorted.rows[first]};
        add_products(own, m.experts[e].gate_up, &wide[width * first * size], is_bf16, up);
        add_products({&inner[first * size], is_bf16, count}, m.experts[e].down, &wide[first * hidden], is_bf16, down);
    }
    if (beside) {
        add_products(x, m.shared->gate_up, &wide[width * all * size], is_bf16, up);
        add_products({&inner[all * size], is_bf16, rows}, m.shared->down, &wide[all * hidden], is_bf16, down);
    }
    run(up);
    soothsay_gated(wide.get(), is_bf16, m.activation, all, size, inner.get());
    if (beside) soothsay_gated(&wide[width * all * size], is_bf16, m.activation, rows, beside, &inner[all * size]);
    run(down);
    add_up<T>(wide.get(), beside ? &wide[all * hidden] : nullptr, sorted, shares.data(), rows, each, hidden, out);
}

}  // namespace

extern "C" void soothsay_route(const void* scores, int are_bf16, int64_t rows, const soothsay_routing* routing,
                               float* shares, int64_t* chosen) {
    Router router(*routing);
    for (int64_t r = 0; r < rows; ++r, shares += routing->each, chosen += routing->each) {
        if (are_bf16) router.route((const bf16*)scores + r * routing->count, shares, chosen);
        else router.route((const float*)scores + r * routing->count, shares, chosen);
    }
}

extern "C" void soothsay_mix(const void* x, int x_is_bf16, int64_t rows, const float* scores,
                             const soothsay_mixture* mixture, float* out) {
    if (!rows) return;
    if (mixture->is_bf16) mix<bf16>({x, x_is_bf16, rows}, *mixture, scores, out);
    else mix<float>({x, x_is_bf16, rows}, *mixture, scores, out);
}
