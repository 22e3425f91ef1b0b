// The arithmetic of AdamW for one weight. Each operation is rounded. Included inside the namespace of each instruction set.

// Updates weight, mean and square: see adamw_step in sparsecomm/backends/adamw.py. `carried` is the square, or 0 in the first
// update; c0 to c5 are coefficients.
template <class A>
[[gnu::always_inline]] inline void adamw_step(A& weight, A& mean, A& square, A quotient, A carried, A c0, A c1, A c2, A c3, A c4,
                                              A c5, A unit_eps, A eps) {
    const A g = quotient * floor_power_of_two(std::sqrt(square) + unit_eps), w = weight;
    const A m = c0 * mean + c1 * g, v = c2 * carried + c3 * (g * g);
    weight = w + ((c5 * w - c4 * (m / (std::sqrt(v) + eps))) - w);
    mean = m;
    square = v;
}

// Converts a nonzero residual to the unit of a new square.
template <class A>
[[gnu::always_inline]] inline A in_new_unit(A residual, A square, A new_square, A unit_eps) {
    constexpr A MAX = std::numeric_limits<A>::max();
    const A before = floor_power_of_two(std::sqrt(square) + unit_eps), after = floor_power_of_two(std::sqrt(new_square) + unit_eps);
    const A rescaled = residual * (before / after);
    return std::abs(rescaled) <= MAX ? rescaled : std::copysign(MAX, residual);
}
