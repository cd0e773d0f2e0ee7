// Products of a few rows with weights that are read once: floats, halves and bfloat16, or integers of 2 to 8 bits times activations
// that are quantized here to 8 bits, for each row and group.
//
// One thread sums each output over its inputs, in order. So its bits do not depend on the other rows.
#include "products.h"
#include "pool.h"
#include <algorithm>
#include <vector>

namespace {

constexpr int64_t WORTH_THREADS = 1 << 15;  // weights; for fewer, waking threads costs more than the work

// Some rows or panels of a product.
struct Part {
    Product* product;
    int64_t begin, end;
};

// Computes parts. Those of one product that follow each other in a thread are one.
template <class Compute>
void run(const std::vector<Part>& parts, bool alone, Compute compute) {
    const int64_t count = int64_t(parts.size());
    parallel(count, alone ? count : 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            Part part = parts[i];
            for (; i + 1 < end && parts[i + 1].product == part.product; ++i) part.end = parts[i + 1].end;
            compute(part);
        }
    });
}

void cut(Product* product, int64_t count, int64_t each, std::vector<Part>& parts) {
    for (int64_t begin = 0; begin < count; begin += each)
        parts.push_back({product, begin, std::min(begin + each, count)});
}

}  // namespace

void add_products(const Rows& x, const soothsay_weights* weights, void* out, int out_is_bf16, Products& products) {
    if (!x.count) return;
    int64_t stride = 0;
    for (const auto* part = weights; part; part = part->next) stride += part->outputs;
    for (const auto* part = weights; part; part = part->next) {
        const bool few = part->bits == 2 || part->bits == 5;
        const bool plain = part->numbers >= SOOTHSAY_FLOATS;
        const auto product = plain             ? product_of_plain
                             : part->bits == 4 ? product_of_4
                             : few             ? product_of_2_or_5
                                               : product_of_6_or_more;
        products.emplace_back(product(x, *part, stride, out, out_is_bf16));
        out = (char*)out + part->outputs * (out_is_bf16 ? 2 : 4);
    }
}

void run(const Products& products) {
    std::vector<Part> rows, panels;
    int64_t weights = 0;
    for (const auto& p : products) {
        cut(p.get(), p->unlaid, p->row_piece, rows);
        cut(p.get(), p->panels, p->panel_piece, panels);
        weights += p->size;
    }
    const bool alone = weights <= WORTH_THREADS;
    run(rows, alone, [](const Part& p) { p.product->lay(p.begin, p.end); });
    run(panels, alone, [](const Part& p) { p.product->multiply(p.begin, p.end); });
}

extern "C" void soothsay_linear(const void* x, int x_is_bf16, int64_t rows, const soothsay_weights* weights, void* out,
                                int out_is_bf16) {
    Products products;
    add_products({x, x_is_bf16, rows}, weights, out, out_is_bf16, products);
    run(products);
}
