// Products of floats with weights that are numbers as they are.
#include "product_of.h"

Product* product_of_plain(const Rows& x, const soothsay_weights& part, int64_t stride, void* out, int out_is_bf16) {
    const auto product = part.numbers == SOOTHSAY_FLOATS   ? product_of<Plain<float>>
                         : part.numbers == SOOTHSAY_HALVES ? product_of<Plain<fp16>>
                                                           : product_of<Plain<bf16>>;
    return product(x, part, stride, out, out_is_bf16);
}
