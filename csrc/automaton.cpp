// The suffix automaton of drafters/ops/stock_automaton.py, and the trees that drafters/ops/continuations.py grows from it.
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
    int first, edges;  // the number of its first edge, and how many there are
};

struct Edge {
    int from, token, to;
};

// A string in an automaton: its state, and its length in tokens.
struct Place {
    int state, length;
};

}  // namespace

struct soothsay_automaton {
    explicit soothsay_automaton(int counted) : counted(counted), table(64, NONE) { add(0, NONE); }

    const int counted;
    std::vector<State> states;
    std::vector<Edge> edges;  // those of a state stand together, in the order of their creation

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

    void follow(Place& at, int token) const {
        int edge;
        while ((edge = find(at.state, token)) == NONE && at.state) {
            at.state = states[at.state].link;
            at.length = states[at.state].length;
        }
        if (edge != NONE) at = behind(at, edges[edge].to);
    }

    // The place after an edge to state `to`.
    Place behind(Place at, int to) const {
        const int length = std::min(at.length + 1, counted - 1);
        return {shorten(to, length), length};
    }

    // Load what is read where a tree goes on at a state, which may be far from all that was read last.
    void prefetch(const State& state) const {
        __builtin_prefetch(&states[std::max(state.link, ROOT)]);
        __builtin_prefetch(edges.data() + state.first);
    }

    // The longest suffix of a text that also occurs elsewhere.
    Place repeated(const soothsay_reading& text) const {
        const int state = text.end == ROOT ? ROOT : shorten(states[text.end].link, counted - 1);
        return {state, std::min(states[state].length, counted - 1)};
    }

private:
    std::vector<int> table;  // hash table: number of the edge by state and token, with linear probing
    int live = 0;  // edges that are in use
    std::vector<int> unused[32];  // first edges of blocks of 2^i edges that are free

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
        if (3 * table.size() < size_t(4) * (live + 1)) {
            table.assign(2 * table.size(), NONE);
            for (const Edge& edge : edges)
                if (edge.from != NONE) table[place(edge.from, edge.token)] = int(&edge - edges.data());
        }
        State& state = states[from];
        if ((state.edges & (state.edges - 1)) == 0) move(state);
        const int edge = state.first + state.edges++;
        table[place(from, token)] = edge;
        edges[edge] = {from, token, to};
        ++live;
    }

    // Move the edges of a state, whose number is 0 or a power of two, to a block with room for twice as many.
    void move(State& state) {
        const int before = state.first, count = state.edges, room = std::max(2 * count, 1);
        std::vector<int>& blocks = unused[__builtin_ctz(room)];
        if (blocks.empty()) {
            state.first = int(edges.size());
            edges.resize(edges.size() + room, {NONE, NONE, NONE});
        } else {
            state.first = blocks.back();
            blocks.pop_back();
        }
        for (int i = 0; i < count; ++i) {
            Edge& edge = edges[before + i];
            table[place(edge.from, edge.token)] = state.first + i;
            edges[state.first + i] = edge;
            edge.from = NONE;
        }
        if (count) unused[__builtin_ctz(count)].push_back(before);
    }

    int add(int length, int link) {
        states.push_back({link, length, 0, 0, 0});
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
        for (int i = 0; i < states[known].edges; ++i) {
            const Edge copied = edges[states[known].first + i];
            connect(state, copied.token, copied.to);
        }
        for (; end != NONE && (edge = find(end, token)) != NONE && edges[edge].to == known; end = states[end].link)
            edges[edge].to = state;
        return state;
    }
};

namespace {

// An automaton in which a text is followed, and the text's longest match there.
struct Source {
    const soothsay_automaton* automaton;
    double doubt;
    Place place;

    void read(const int64_t* tokens, int64_t count) {
        place.state = automaton->shorten(place.state, place.length);  // it may have been split
        for (int64_t i = 0; i < count; ++i) automaton->follow(place, int(tokens[i]));
    }
};

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
    int number, node, token, to, source;
    Place place;
    double path, mass;  // probabilities of the node, and of a token of the context after it

    bool operator>(const Guess& other) const {
        return std::tie(minus, number) > std::tie(other.minus, other.number);
    }
};

// How likely the target is to draw a token that has this share of the counts. See `KnownNoise.probability` of soothsay/drafters/ops/automaton.py.
double believed(double share, int token, Key key, double odds, double weight) {
    const double wait = -std::log1p(-(double(key.hash(uint32_t(token))) + 0.5) * 0x1p-32);
    const double against = odds * std::pow(wait, weight);
    return share / (share + (1.0 - share) * against);
}

}  // namespace

struct soothsay_matcher {
    soothsay_matcher(soothsay_automaton* own, double doubt) : own(own), sources{{own, doubt, {ROOT, 0}}} {}

    soothsay_automaton* own;
    soothsay_reading text{ROOT, ROOT};
    std::vector<Source> sources;  // the first is the text's own automaton

    int longest() const {
        int most = 0;
        for (const Source& source : sources) most = std::max(most, source.place.length);
        return most;
    }
};

extern "C" {

soothsay_automaton* soothsay_automaton_new(int counted) { return new soothsay_automaton(counted); }

void soothsay_automaton_free(soothsay_automaton* automaton) { delete automaton; }

void soothsay_automaton_read(soothsay_automaton* automaton, soothsay_reading* text, const int64_t* tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i) automaton->read(*text, int(tokens[i]));
}

soothsay_matcher* soothsay_matcher_new(soothsay_automaton* own, double doubt) { return new soothsay_matcher(own, doubt); }

void soothsay_matcher_free(soothsay_matcher* matcher) { delete matcher; }

int soothsay_matcher_watch(soothsay_matcher* matcher, const soothsay_automaton* const* others, const double* doubts,
                           int count, const int64_t* tokens, int64_t num_tokens) {
    const std::vector<Source> before = matcher->sources;
    matcher->sources.resize(1);
    for (int i = 0; i < count; ++i) {
        const auto known = std::find_if(before.begin() + 1, before.end(),
                                        [&](const Source& one) { return one.automaton == others[i]; });
        matcher->sources.push_back({others[i], doubts[i], {ROOT, 0}});
        Source& source = matcher->sources.back();
        if (known != before.end())
            source.place = known->place;
        else
            source.read(tokens, num_tokens);
    }
    return matcher->longest();
}

int soothsay_matcher_read(soothsay_matcher* matcher, const int64_t* tokens, int64_t count) {
    std::vector<Source>& sources = matcher->sources;
    for (int64_t i = 0; i < count; ++i) matcher->own->read(matcher->text, int(tokens[i]));
    sources[0].place = matcher->own->repeated(matcher->text);
    for (size_t i = 1; i < sources.size(); ++i) sources[i].read(tokens, count);
    return matcher->longest();
}

int soothsay_matcher_grow(const soothsay_matcher* matcher, int nodes, int depth, int widest, double least, int draws,
                          uint64_t seed, int64_t first, double odds, double weight, int* tokens, int* parents,
                          double* scores) {
    Tree tree{tokens, parents, scores};
    scores[0] = 0.0;
    std::priority_queue<Guess, std::vector<Guess>, std::greater<Guess>> open;
    const std::vector<Source>& sources = matcher->sources;
    int number = 0;
    for (Source source : sources) {
        source.read(nullptr, 0);
        if (source.place.length)
            open.push({-1.0, number, 0, NONE, NONE, number, source.place, 1.0, 1.0});
        ++number;
    }
    const size_t count = sources.size();
    std::vector<char> expanded(size_t(nodes) * count);
    while (!open.empty() && tree.size() < nodes) {
        auto [minus, _, node, token, to, source, place, path, mass] = open.top();
        open.pop();
        const soothsay_automaton& automaton = *sources[source].automaton;
        if (token != NONE) {
            node = tree.add(node, token, std::log(-minus) - tree.scores[node]);
            char& done = expanded[node * count + source];
            if (done) continue;  // a longer context added it
            done = 1;
            place = automaton.behind(place, to);
            path = -minus, mass = 1.0;
        }
        if (tree.depths[node] >= depth) continue;
        const State& state = automaton.states[place.state];
        const Edge* edges = automaton.edges.data() + state.first;
        const double doubt = sources[source].doubt / (sources[source].doubt + place.length);
        int64_t total = state.count;
        if (state.edges <= widest) {
            total = 0;
            for (int i = 0; i < state.edges; ++i) total += automaton.states[edges[i].to].count;
        }
        if (total) {
            const double share = mass / double(total);
            const Key key = Key::of(seed, uint64_t(first + tree.depths[node]));
            for (int i = 0; i < std::min(state.edges, widest); ++i) {
                const State& next = automaton.states[edges[i].to];
                double own = share * (next.count - doubt);
                if (draws) own = believed(own, edges[i].token, key, odds, weight);
                if (path * own >= least) {
                    automaton.prefetch(next);
                    open.push({-(path * own), ++number, node, edges[i].token, edges[i].to, source, place, path, mass});
                }
            }
            mass = share * std::min(doubt * state.edges, double(total));
        }
        if (path * mass >= least && state.link > ROOT) {
            const State& shorter = automaton.states[state.link];
            automaton.prefetch(shorter);
            const Place after{state.link, shorter.length};
            open.push({-path * (draws ? 1.0 : mass), ++number, node, NONE, NONE, source, after, path, mass});
        }
    }
    return tree.size();
}
}
