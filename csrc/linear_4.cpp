// Products with weights of 4 bits, or those that a table has for them.
#include "product_of.h"

Product* product_of_4(const Rows& x, const soothsay_weights& part, int64_t stride, void* out, int out_is_bf16) {
    return (part.table ? product_of<Int<4, true>> : product_of<Int<4>>)(x, part, stride, out, out_is_bf16);
}
