// The arithmetic of AdamW for one weight. Each operation is rounded. Included inside the namespace of each instruction set.

// Updates weight, mean and square by a gradient: see adamw_step in sparsecomm/backends/adamw.py. c0 to c5 are coefficients.
template <class A>
[[gnu::always_inline]] inline void adamw_step(A& weight, A& mean, A& square, A gradient, A c0, A c1, A c2, A c3, A c4, A c5, A eps) {
    const A m = c0 * mean + c1 * gradient, v = c2 * square + c3 * (gradient * gradient);
    weight = c5 * weight - c4 * (m / (std::sqrt(v) + eps));
    mean = m;
    square = v;
}
