// Products of rows and weights that run together: first all rows are laid out, then all panels are multiplied, in pieces that
// threads share.
#pragma once
#include "kernels.h"
#include <memory>
#include <vector>

// Rows of floats or bfloat16, as long as the weights' inputs. With an order, row i is number order[i] of `data`.
struct Rows {
    const void* data;
    int are_bf16;
    int64_t count;
    const int64_t* order = nullptr;
};

// Rows times one part of a layer's weights. Pieces of it may be computed by any thread, in any order.
class Product {
  public:
    int64_t unlaid = 0, row_piece = 1;    // rows to lay out, and how many are worth a piece
    int64_t panels = 0, panel_piece = 1;
    int64_t size = 0;                     // weights
    virtual ~Product() = default;
    virtual void lay(int64_t begin, int64_t end) = 0;       // rows, as panels read them
    virtual void multiply(int64_t begin, int64_t end) = 0;  // panels, after all rows are laid out
};

typedef std::vector<std::unique_ptr<Product>> Products;

// The product of x and one part of a layer's weights, by its number of bits: out [rows, outputs], `stride` from row to row.
Product* product_of_2_or_5(const Rows& x, const soothsay_weights& part, int64_t stride, void* out, int out_is_bf16);
Product* product_of_4(const Rows& x, const soothsay_weights& part, int64_t stride, void* out, int out_is_bf16);
Product* product_of_6_or_more(const Rows& x, const soothsay_weights& part, int64_t stride, void* out, int out_is_bf16);
Product* product_of_plain(const Rows& x, const soothsay_weights& part, int64_t stride, void* out, int out_is_bf16);

// Adds the products of x and all parts of a layer's weights: out [rows, all outputs].
void add_products(const Rows& x, const soothsay_weights* weights, void* out, int out_is_bf16, Products& products);

void run(const Products& products);
