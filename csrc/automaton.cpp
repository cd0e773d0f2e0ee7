// The suffix automaton of drafters/lookup/stock_automaton.py, and the trees that drafters/lookup/backoff.py grows from it.
// Both are equal to the bit: states have the same numbers, followers the same order, and sums the same order.
#include "kernels.h"
#include "noise.h"
#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <tuple>
#include <vector>

namespace {

constexpr int ROOT = 0, NONE = -1;

struct State {
    int link, length, count;
    int first, last, edges;  // its edges in the order of their creation, and their number
};

struct Edge {
    int from, token, to, next;
};

}  // namespace

struct soothsay_automaton {
    explicit soothsay_automaton(int counted) : counted(counted), table(64, NONE) { add(0, NONE); }

    const int counted;
    std::vector<State> states;
    std::vector<Edge> edges;

    // The edge of a state and a token; NONE if there is none.
    int find(int from, int token) const { return table[place(from, token)]; }

    int shorten(int state, int length) const {
        while (state && states[states[state].link].length >= length) state = states[state].link;
        return state;
    }

    void read(soothsay_reading& text, int token) {
        text.end = extend(text.end, token);
        text.counted = shorten(edges[find(text.counted, token)].to, counted);
        for (int state = text.counted; state > ROOT; state = states[state].link) ++states[state].count;
    }

    void follow(soothsay_place& at, int token) const {
        int edge;
        while ((edge = find(at.state, token)) == NONE && at.state) {
            at.state = states[at.state].link;
            at.length = states[at.state].length;
        }
        if (edge != NONE) at = behind(at, edge);
    }

    soothsay_place behind(soothsay_place at, int edge) const {
        const int length = std::min(at.length + 1, counted - 1);
        return {shorten(edges[edge].to, length), length};
    }

private:
    std::vector<int> table;  // hash table: number of the edge by state and token, with linear probing

    size_t place(int from, int token) const {
        const uint64_t key = uint64_t(uint32_t(from)) << 32 | uint32_t(token);
        size_t at = key * 0x9E3779B97F4A7C15u >> 32;  // 2^64 over the golden ratio
        for (;; ++at) {
            at &= table.size() - 1;
            const int edge = table[at];
            if (edge == NONE || (edges[edge].from == from && edges[edge].token == token)) return at;
        }
    }

    void connect(int from, int token, int to) {
        if (3 * table.size() < 4 * (edges.size() + 1)) {
            table.assign(2 * table.size(), NONE);
            for (size_t edge = 0; edge < edges.size(); ++edge)
                table[place(edges[edge].from, edges[edge].token)] = int(edge);
        }
        const int edge = int(edges.size());
        table[place(from, token)] = edge;
        edges.push_back({from, token, to, NONE});
        State& state = states[from];
        (state.edges++ ? edges[state.last].next : state.first) = edge;
        state.last = edge;
    }

    int add(int length, int link) {
        states.push_back({link, length, 0, NONE, NONE, 0});
        return int(states.size()) - 1;
    }

    int extend(int end, int token) {
        if (const int edge = find(end, token); edge != NONE) return target(end, token, edge);
        const int state = add(states[end].length + 1, ROOT);
        int edge = NONE;
        for (; end != NONE && (edge = find(end, token)) == NONE; end = states[end].link) connect(end, token, state);
        if (end != NONE) {
            const int link = target(end, token, edge);
            states[state].link = link;
        }
        return state;
    }

    // The state of exactly the strings of `end` plus `token`. A state with longer strings too is split.
    int target(int end, int token, int edge) {
        const int known = edges[edge].to;
        if (states[known].length == states[end].length + 1) return known;
        const int state = add(states[end].length + 1, states[known].link);
        states[state].count = states[known].count;
        states[known].link = state;
        for (int e = states[known].first; e != NONE; e = edges[e].next) connect(state, edges[e].token, edges[e].to);
        for (; end != NONE && (edge = find(end, token)) != NONE && edges[edge].to == known; end = states[end].link)
            edges[edge].to = state;
        return state;
    }
};

namespace {

// A growing tree.
struct Tree {
    int* tokens;
    int* parents;
    double* scores;
    std::vector<int> depths{0};

    int size() const { return int(depths.size()); }

    int add(int parent, int token, double log_prob) {
        for (int node = parent + 1; node < size(); ++node)
            if (parents[node] == parent && tokens[node] == token) return node;
        const int node = size();
        tokens[node] = token, parents[node] = parent, scores[node] = scores[parent] + std::min(log_prob, 0.0);
        depths.push_back(depths[parent] + 1);
        return node;
    }
};

// A token after a node, or a context whose followers come after it.
struct Guess {
    double minus;  // minus its probability, or the largest that a follower may have
    int number, node, token, source;
    soothsay_place place;
    double path, mass;  // probabilities of the node, and of a token of the context after it

    bool operator>(const Guess& other) const {
        return std::tie(minus, number) > std::tie(other.minus, other.number);
    }
};

// How likely the target is to draw a token that has this share of the counts. See `Draws.believed` of soothsay/core/automaton.py.
double believed(double share, int token, Key key, double odds, double weight) {
    const double wait = -std::log1p(-(double(key.hash(uint32_t(token))) + 0.5) * 0x1p-32);
    const double against = odds * std::pow(wait, weight);
    return share / (share + (1.0 - share) * against);
}

}  // namespace

extern "C" {

soothsay_automaton* soothsay_automaton_new(int counted) { return new soothsay_automaton(counted); }

void soothsay_automaton_free(soothsay_automaton* automaton) { delete automaton; }

void soothsay_automaton_read(soothsay_automaton* automaton, soothsay_reading* text, const int64_t* tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i) automaton->read(*text, int(tokens[i]));
}

void soothsay_automaton_follow(const soothsay_automaton* automaton, soothsay_place* place, const int64_t* tokens,
                               int64_t count) {
    place->state = automaton->shorten(place->state, place->length);
    for (int64_t i = 0; i < count; ++i) automaton->follow(*place, int(tokens[i]));
}

void soothsay_automaton_repeated(const soothsay_automaton* automaton, const soothsay_reading* text, soothsay_place* place) {
    const int most = automaton->counted - 1;
    place->state = text->end == ROOT ? ROOT : automaton->shorten(automaton->states[text->end].link, most);
    place->length = std::min(automaton->states[place->state].length, most);
}

int soothsay_automaton_grow(const soothsay_automaton* const* automata, const soothsay_place* places, const double* doubts,
                            int count, int nodes, int depth, int widest, double least, int draws, uint64_t seed,
                            int64_t first, double odds, double weight, int* tokens, int* parents, double* scores) {
    Tree tree{tokens, parents, scores};
    scores[0] = 0.0;
    std::priority_queue<Guess, std::vector<Guess>, std::greater<Guess>> open;
    for (int source = 0; source < count; ++source) open.push({-1.0, source, 0, NONE, source, places[source], 1.0, 1.0});
    int number = count;
    std::vector<char> expanded(size_t(nodes) * count);
    while (!open.empty() && tree.size() < nodes) {
        auto [minus, _, node, token, source, place, path, mass] = open.top();
        open.pop();
        const soothsay_automaton& automaton = *automata[source];
        if (token != NONE) {
            node = tree.add(node, token, std::log(-minus) - tree.scores[node]);
            char& done = expanded[size_t(node) * count + source];
            if (done) continue;  // a longer context added it
            done = 1;
            place = automaton.behind(place, automaton.find(place.state, token));
            path = -minus, mass = 1.0;
        }
        if (tree.depths[node] >= depth) continue;
        const State& state = automaton.states[place.state];
        const double doubt = doubts[source] / (doubts[source] + place.length);
        int64_t total = state.count;
        if (state.edges <= widest) {
            total = 0;
            for (int e = state.first; e != NONE; e = automaton.edges[e].next)
                total += automaton.states[automaton.edges[e].to].count;
        }
        if (total) {
            const double share = mass / double(total);
            const Key key = Key::of(seed, uint64_t(first + tree.depths[node]));
            int left = widest;
            for (int e = state.first; e != NONE && left; e = automaton.edges[e].next, --left) {
                const Edge& edge = automaton.edges[e];
                double own = share * (automaton.states[edge.to].count - doubt);
                if (draws) own = believed(own, edge.token, key, odds, weight);
                if (path * own >= least)
                    open.push({-(path * own), ++number, node, edge.token, source, place, path, mass});
            }
            mass = share * std::min(doubt * state.edges, double(total));
        }
        if (path * mass >= least && state.link > ROOT) {
            const soothsay_place shorter{state.link, automaton.states[state.link].length};
            open.push({-path * (draws ? 1.0 : mass), ++number, node, NONE, source, shorter, path, mass});
        }
    }
    return tree.size();
}
}
