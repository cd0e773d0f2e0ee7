// Products with weights of 2 or 5 bits.
#include "product_of.h"

Product* product_of_2_or_5(const Rows& x, const soothsay_weights& part, int64_t stride, void* out, int out_is_bf16) {
    return (part.bits == 2 ? product_of<Int<2>> : product_of<Int<5>>)(x, part, stride, out, out_is_bf16);
}
