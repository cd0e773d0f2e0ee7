// Products with weights of 6 or 8 bits, or in bfloat16.
#include "product_of.h"

Product* product_of_6_or_more(const Rows& x, const soothsay_weights& part, int64_t stride, void* out, int out_is_bf16) {
#if defined(SOOTHSAY_MULTIPLIES_BF16)
    if (part.numbers == SOOTHSAY_BF16_PAIRS) return product_of<Bf16>(x, part, stride, out, out_is_bf16);
#endif
    return (part.bits == 6 ? product_of<Int<6>> : product_of<Int<8>>)(x, part, stride, out, out_is_bf16);
}
