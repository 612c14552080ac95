// What latent attention has beside attention itself: products with a matrix for each head, and rows for the cache.
#include <algorithm>
#include <vector>

#include "kv.h"
#include "layer_ops.h"
#include "linear.h"
#include "pool.h"
#include "vec.h"

namespace {

constexpr int64_t LONG = 1 << 22;  // multiply-adds of a head from which on threads share them

// Rows of a head, which are `step` numbers apart.
struct Rows {
    float* first;
    int64_t step, T, K;

    void copy_to(float* to) const {
        for (int64_t t = 0; t < T; t++) std::copy_n(first + t * step, K, to + t * K);
    }
};

// y = x w^T with the rows [row, row + y.K) of a packed matrix, which begin anywhere in a panel.
void multiply_part(const Matrix& w, int64_t row, const Rows& x, const Rows& y) {
    const int64_t panel = row / PANEL, offset = row % PANEL, width = offset + y.K;
    static thread_local std::vector<float> memory;
    const size_t size = x.T * (x.K + width);
    if (memory.size() < size) memory.resize(size);
    float *from = memory.data(), *to = from + x.T * x.K;
    x.copy_to(from);
    const char* data = static_cast<const char*>(w.data) + panel * PANEL * w.K * (w.format == FLOAT32 ? 4 : 2);
    linear({data, nullptr, w.format, width, w.K, w.row_bits}, from, x.T, to);
    for (int64_t t = 0; t < y.T; t++) std::copy_n(to + t * width + offset, y.K, y.first + t * y.step);
}

}  // namespace

// y[T][H][N] = x[T][H][K] w[H][N][K]^T, w packed as a matrix of H N rows; steps from a token and from a head to the next.
extern "C" void fl_linear_heads(float* x, int64_t x_token, int64_t x_head, const void* w, int64_t format, float* y,
                                int64_t y_token, int64_t y_head, int64_t T, int64_t H, int64_t N, int64_t K) {
    const Matrix matrix{w, nullptr, format, H * N, K, 0};
    const auto head = [=](int64_t h) {
        multiply_part(matrix, h * N, {x + h * x_head, x_token, T, K}, {y + h * y_head, y_token, T, N});
    };
    if (T * N * K < LONG) return pool::parallel(H, head);
    for (int64_t h = 0; h < H; h++) head(h);
}

// Rotate the last R numbers of queries [T][H][X] and rows [T][X] in place, and write rows to their slots. Returns 1,
// having done nothing, for a position or slot that does not exist.
extern "C" int64_t fl_rope_and_cache_latent(float* query, float* row, const float* cos, const float* sin, int64_t P,
                                            int64_t R, int64_t interleaved, const int32_t* positions,
                                            const int64_t* slots, void* rows, float* scales, int64_t storage,
                                            int64_t num_slots, int64_t T, int64_t H, int64_t X, int64_t L) {
    for (int64_t t = 0; t < T; t++)
        if (positions[t] < 0 || positions[t] >= P || slots[t] < 0 || slots[t] >= num_slots) return 1;
    pool::parallel_ranges(T, T * (H * R + X) * 4, [=](int64_t t, int64_t end) {
        for (; t < end; t++) {
            const int64_t half = R / 2, at = positions[t] * half;
            for (int64_t h = 0; h <= H; h++) {
                float* first = (h < H ? query + (t * H + h) * X : row + t * X) + X - R;
                interleaved ? rotate(first, first + 1, 2, cos + at, sin + at, half)
                            : rotate(first, first + half, 1, cos + at, sin + at, half);
            }
            with_storage(storage, [=](auto number) {
                auto* to = static_cast<decltype(number)*>(rows) + slots[t] * X;
                float* scale = scales ? scales + slots[t] * 2 : nullptr;
                store_head(row + t * X, L, to, 1, scale);
                store_head(row + t * X + L, X - L, to + L, 1, scale ? scale + 1 : nullptr);
            });
        }
    });
    return 0;
}
