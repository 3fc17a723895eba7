// Functions that the NVFP4 kernels for Hopper share: they dequantise weights, add the adapter and store sums. Needs
// hopper.cuh.

// ---- NVFP4 ---------------------------------------------------------------------------------------------------------

// Converts a lane's eight weights of a fragment to bf16 and multiplies them by their scales; the result is 2^-14 times
// the weight. ``row`` and ``row_8`` are the scales of rows g and g + 8, times 2^112. A bf16 number that has a code's sign
// at bit 15 and its exponent and mantissa at bits 8 to 6 is the code's value times 2^-126, subnormals included. The
// word (``BITS`` in nvfp4_decode.py) has the first pair of codes at these bits and the next two pairs 3 and 6 bits
// higher; a product moves the last pair, without carries, because the moved bits do not overlap.
FUNCTION void dequantize(u32 (&fragment)[4], u32 word, u32 row, u32 row_8) {
  const u32 kept = 0x81C081C0u;
  fragment[0] = multiply_pair(word & kept, row);
  fragment[2] = multiply_pair(__funnelshift_r(word, word, 3) & kept, row);
  fragment[1] = multiply_pair(__funnelshift_r(word, word, 6) & kept, row_8);
  fragment[3] = multiply_pair(((word & 0x001B001Bu) * 0x4108u) & kept, row_8);
}

constexpr float TO_VALUE = 16384.f;  // 2^14

// Converts four non-negative e4m3 values to bf16, times 2^112: bytes 0 and 2 to ``even``, 1 and 3 to ``odd``. This is
// exact, because all e4m3 values are multiples of 2^-9 below 2^9. The moved bits are the value times 2^-120; the factor
// 2^232 that is left exceeds bf16's range, so it is applied in two products.
FUNCTION void scales_to_bf16(u32 bytes, u32 &even, u32 &odd) {
  const u32 two_127 = 0x7F007F00u, two_105 = 0x74007400u;
  even = multiply_pair(multiply_pair((bytes << 4) & 0x07F007F0u, two_127), two_105);
  odd = multiply_pair(multiply_pair((bytes >> 4) & 0x07F007F0u, two_127), two_105);
}

// ---- an adapter ----------------------------------------------------------------------------------------------------

struct Adapter {  // y += h B^T; the decode GEMM computes h itself, lora_hopper.cu computes it for the batch GEMM
  u16 *hidden;  // [slices, tokens, rank]; null without an adapter
  const u16 *b0, *b1, *b2;  // [outputs of a slice, rank]
  int first1, first2;  // first output of slices 2 and 3; N or more if there is none
  int rank;
};

FUNCTION int slice_of(const Adapter &adapter, int n) { return (n >= adapter.first1) + (n >= adapter.first2); }

FUNCTION const u16 *row_of_b(const Adapter &adapter, int n) {
  const int slice = slice_of(adapter, n);
  const u16 *b = slice == 0 ? adapter.b0 : slice == 1 ? adapter.b1 : adapter.b2;
  return b + (size_t)(n - (slice == 0 ? 0 : slice == 1 ? adapter.first1 : adapter.first2)) * adapter.rank;
}

// Fetches the rows of B for outputs n to n + OUTPUTS to L2 while the base GEMM is computed.
template <int OUTPUTS, int THREADS>
FUNCTION void prefetch_b(const Adapter &adapter, int n, int N) {
  for (int i = threadIdx.x; i < OUTPUTS && n + i < N; i += THREADS) prefetch_to_l2(row_of_b(adapter, n + i));
}

// Adds h B^T to a warp's sums of COUNT x 16 outputs and TILES x 8 tokens; the outputs start at n and lie in one slice.
// The thread blocks of a cluster hold partial sums of the same outputs; for each 16 outputs, one of these thread blocks
// adds the product. B is loaded first; ``wait`` returns when h is complete, and then h is loaded in groups of IN_FLIGHT
// tiles.
template <int COUNT, int TILES, int IN_FLIGHT, typename Wait>
FUNCTION void add_adapter(float *sums, const Adapter &adapter, int n, int first_token, int tokens, int splits,
                          Wait wait) {
  static_assert(TILES % IN_FLIGHT == 0, "");
  const int lane = threadIdx.x & 31, g = lane >> 2, rank = adapter.rank;
  if (blockIdx.y >= COUNT) return;
  u32 ours = 1;  // bit i is set if this thread block adds the product for the i-th 16 outputs
  if (COUNT > 1) {
    ours = 0;
    for (int i = blockIdx.y; i < COUNT; i += splits) ours |= 1u << i;
  }
  const u16 *row = row_of_b(adapter, n + g);
  const u16 *hidden = adapter.hidden + ((size_t)slice_of(adapter, n) * tokens + first_token + g) * rank;
#pragma unroll 1
  for (int r = (lane & 3) * 8; r < (rank + 31) / 32 * 32; r += 32) {
    uint4 rows[COUNT][2];
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        rows[i][j] = load_16_or_zero(row + (i * 16 + j * 8) * rank + r, r < rank && (ours >> i & 1));
    wait();
#pragma unroll
    for (int first = 0; first < TILES; first += IN_FLIGHT) {
      uint4 columns[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++)
        columns[i] = load_16_or_zero(hidden + (first + i) * 8 * rank + r,
                                     r < rank && first_token + (first + i) * 8 + g < tokens);
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        if (ours >> i & 1)
#pragma unroll
          for (int j = 0; j < IN_FLIGHT; j++)
            multiply_chunk(sums + (i * TILES + first + j) * 4, rows[i][0], rows[i][1], columns[j]);
    }
  }
}

// ---- sums to y ----------------------------------------------------------------------------------------------------

template <int IN_FLIGHT>  // loads at the same time
FUNCTION float4 sum_of_cluster(u32 address, int blocks) {  // over all thread blocks, in the order of their ranks
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int first = 0; first < blocks; first += IN_FLIGHT) {
    float4 more[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++)
      if (first + i < blocks) more[i] = load_from_cluster(address, first + i);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++)
      if (first + i < blocks) sum.x += more[i].x, sum.y += more[i].y, sum.z += more[i].z, sum.w += more[i].w;
  }
  return sum;
}

FUNCTION uint2 four_to_bf16(float4 v) {
  return make_uint2((u32)to_bf16(v.x) | ((u32)to_bf16(v.y) << 16), (u32)to_bf16(v.z) | ((u32)to_bf16(v.w) << 16));
}

// Stores four outputs of a token, from n on, to y [tokens, N]; stores nothing if n is past the end.
FUNCTION void store_outputs(u16 *y, const u16 *bias, int token, int n, int N, float4 sum) {
  if (n >= N) return;
  if (bias) {  // Humming's order: of 32 outputs first those with n % 8 in (0, 1), then (2, 3), ...
    const u16 *from = bias + (n & ~31) + ((n >> 1) & 2) * 8 + ((n >> 3) & 3) * 2;
    sum.x += from_bf16(from[0]), sum.y += from_bf16(from[1]);
    sum.z += from_bf16(from[8]), sum.w += from_bf16(from[9]);
  }
  *(uint2 *)(y + (size_t)token * N + n) = four_to_bf16(sum);
}

// Divides what a cluster stores, FOURS groups of four outputs for each token, among its ``splits`` thread blocks, and
// calls ``store`` for each group of this thread block, with the token and the group's first output as arguments.
template <int FOURS, int THREADS, typename Store>
FUNCTION void store_share(int tokens, int splits, Store store) {
  // Each thread block in turn gets ``turn`` consecutive groups: one per thread, or fewer if there are few groups.
  const int parts = tokens * FOURS, turn = min(THREADS, (parts + splits - 1) / splits);
  if (threadIdx.x >= turn) return;
  for (int part = blockIdx.y * turn + threadIdx.x; part < parts; part += splits * turn)
    store(part / FOURS, part % FOURS * 4);
}

// Adds up the partial sums that the thread blocks of a cluster hold for the same 4 * FOURS outputs of each token, the
// first of which is output ``n``, and stores this thread block's share of the results to y [tokens, N].
template <int FOURS, int THREADS, int IN_FLIGHT>
FUNCTION void store_sums_of_cluster(u32 sums, u16 *y, const u16 *bias, int tokens, int n, int N, int splits) {
  store_share<FOURS, THREADS>(tokens, splits, [=](int token, int output) {
    const u32 address = sums + (token * (FOURS * 4 + 4) + output) * 4;
    store_outputs(y, bias, token, n + output, N, sum_of_cluster<IN_FLIGHT>(address, splits));
  });
}

// ---- silu(gate) * up -------------------------------------------------------------------------------------------------

FUNCTION float gated(float gate, float up) {  // rounds like bf16 operations of torch: gate and up, silu, the product
  const float x = from_bf16(to_bf16(gate));
  return from_bf16(to_bf16(x / (1.f + expf(-x)))) * from_bf16(to_bf16(up));
}

// Stores a thread block's share of y = silu(gate) * up [tokens, N] from output ``n`` on. For each token, the cluster
// has the sums of 128 outputs of gate, followed by those of the 128 outputs of up with the same indices.
template <int THREADS, int IN_FLIGHT>
FUNCTION void store_gated_sums(u32 sums, u16 *y, int tokens, int n, int N, int splits) {
  constexpr int FOURS = 32;
  store_share<FOURS, THREADS>(tokens, splits, [=](int token, int output) {
    const u32 address = sums + (token * (FOURS * 8 + 4) + output) * 4;
    const float4 gate = sum_of_cluster<IN_FLIGHT>(address, splits);
    const float4 up = sum_of_cluster<IN_FLIGHT>(address + FOURS * 16, splits);
    store_outputs(y, nullptr, token, n + output, N,
                  make_float4(gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w)));
  });
}
