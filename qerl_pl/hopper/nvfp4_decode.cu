// GEMM y = x W^T of bf16 inputs and NVFP4 weights for few tokens on Hopper. nvfp4_decode.py documents the arguments.
//
// Names: a k-block is 16 inputs; a fragment is the weights of 16 outputs of a k-block; a tile is 64 outputs. A thread
// block computes 256 outputs: each of the four warps of a warpgroup has one tile, and the warpgroups have different
// k-blocks. Fragments are multiplied from registers: for 8 tokens by mma, which each warp executes on its own with its
// own fragments, and for more tokens by wgmma, which is faster then. The j-th wgmma takes the j-th fragment of each
// warp's tile, and the tokens from shared memory. The thread blocks that compute the same 256 outputs over different
// parts of the inputs form a cluster, which adds up its sums in shared memory. If W is the fused gate and up of an MLP
// and y = silu(gate) * up, 128 of a thread block's outputs are of gate, and the others are the outputs of up with the
// same indices.

struct Next {  // the start of the weight that the next GEMM reads
  const char *weight;  // null to fetch nothing
  int parts, stride;  // parts into which that GEMM divides the inputs, and the bytes from one to the next
  int blocks, bytes;  // thread blocks that fetch, and the bytes that each of them fetches
};

FUNCTION void fetch_to_l2(const Next &next, int block) {  // this thread block's bytes; called by one thread
  if (next.weight && block < next.blocks)
    prefetch_to_l2(next.weight + (size_t)(block % next.parts) * next.stride + (block / next.parts) * next.bytes,
                   next.bytes);
}

// ---- h = x A^T of an adapter, by the first thread blocks of the same launch -----------------------------------------

struct Shrink {
  const u16 *a0, *a1, *a2;  // [rank, K] of each slice; null if there is no such slice
  const long long *indices;  // [tokens], negative for tokens without the adapter
  int clusters;  // that compute h = x A^T, each for one slice and 32 ranks; 0 without an adapter
};

// Numbers of thread blocks that have written h, and of those that have read it. Both are zero whenever no kernel of
// this module runs: launches of a module must not overlap, except as dependent launches do.
__device__ unsigned hidden_written, hidden_read;

FUNCTION void wait_for_hidden(const Shrink &shrink, int splits) {  // called by a whole warp
  if ((threadIdx.x & 31) == 0)
    while (load_acquire(&hidden_written) != shrink.clusters * splits) __nanosleep(20);
  __syncwarp();
}

template <int TOKENS, int WARPS>
FUNCTION void compute_hidden(const u16 *x, const Shrink &shrink, const Adapter &adapter, int tokens, int K,
                             int splits) {
  constexpr int IN_FLIGHT = TOKENS == 8 ? 4 : TOKENS == 16 ? 3 : 2;  // as many as registers allow
  const int parts = (adapter.rank + 31) / 32, slice = blockIdx.x / parts, first_rank = blockIdx.x % parts * 32;
  const u16 *a = slice == 0 ? shrink.a0 : slice == 1 ? shrink.a1 : shrink.a2;
  const int threads = WARPS * 32;
  prefetch_a(a, K, first_rank, adapter.rank, blockIdx.y * threads + threadIdx.x, splits * threads);
  wait_for_kernel_before();
  u16 *hidden = adapter.hidden + (size_t)slice * tokens * adapter.rank;
  shrink_tile<TOKENS, 1, WARPS, IN_FLIGHT, 8>(x, a, shrink.indices, hidden, tokens, K, adapter.rank, splits, 0,
                                              first_rank);
  let_next_kernel_start();
  __syncthreads();
  if (threadIdx.x == 0) add_release(&hidden_written, 1);
  synchronize_cluster_without_memory();  // other thread blocks may still read this one's sums
}

// ---- the GEMM -------------------------------------------------------------------------------------------------------

// Shared memory: x of X_SLOTS times X_STAGES stages, in boxes of 64 inputs, [TOKENS][128 bytes]; then STAGES times, per
// warp, K_BLOCKS x 512 bytes of weights and K_BLOCKS x 64 bytes of scales; then for each warp K_BLOCKS x 128 bytes of
// bf16 scales. At the end the sums overwrite all. Weights are copied by the warp that reads them, a stage at a time,
// and x by all warps, for X_STAGES stages at a time, so that they wait for each other only then.
template <int TOKENS, int GROUPS, int K_BLOCKS, int STAGES, int X_STAGES>
FUNCTION void nvfp4_decode(const u16 *x, const uint4 *weight, const uint4 *scale, const float *global_scale,
                           const u16 *bias, u16 *y, int tokens, int N, int K, int splits, int is_gated, Next next,
                           Adapter adapter, Shrink shrink) {
  extern __shared__ __align__(1024) uint4 shared[];
  constexpr int WARPS = GROUPS * 4, THREADS = WARPS * 32, STAGE_K_BLOCKS = K_BLOCKS * GROUPS;
  constexpr int X_TILE_BYTES = TOKENS * 128, X_BYTES = STAGE_K_BLOCKS / 4 * X_TILE_BYTES;
  constexpr int X_SLOT = X_STAGES * X_BYTES, X_SLOTS = (STAGES - 2) / X_STAGES + 2, X_ALL = X_SLOTS * X_SLOT;
  constexpr int WARP_BYTES = K_BLOCKS * 576, STAGE = WARPS * WARP_BYTES;
  constexpr bool BY_MMA = TOKENS == 8;
  static_assert((K_BLOCKS == 4 || K_BLOCKS == 8) && STAGES >= 2 && X_BYTES % 1024 == 0, "");

  const int blocks = gridDim.x - shrink.clusters, block = blockIdx.x - shrink.clusters;  // of 256 outputs
  constexpr int FRAGMENTS = 4;  // of a tile and k-block
  const int readers = splits < FRAGMENTS ? splits : FRAGMENTS;  // thread blocks of a cluster that add the adapter
  if (block < 0) {
    compute_hidden<TOKENS, WARPS>(x, shrink, adapter, tokens, K, splits);
    return;
  }
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xFFFFFFFFu, thread >> 5, 0), group = warp / 4;
  const int k_blocks = K >> 4, stages = (k_blocks + STAGE_K_BLOCKS - 1) / STAGE_K_BLOCKS;
  const int first = (u32)stages * blockIdx.y / (u32)splits;
  const int last = (u32)stages * (blockIdx.y + 1) / (u32)splits;
  // This warp's tile, and the outputs where the thread block's first two tiles and its last two tiles start.
  const int first_half = block * (is_gated ? 128 : 256), second_half = is_gated ? first_half + N / 2 : first_half + 128;
  // Past the last output, a warp computes the last tile again, and its sums are not stored.
  const int tiles = N >> 6, tile = min(((warp & 2 ? second_half : first_half) >> 6) + (warp & 1), tiles - 1);
  const u32 memory = (u32)__cvta_generic_to_shared(shared);

  float sums[4][TOKENS / 2];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < TOKENS / 2; j++) sums[i][j] = 0.f;

  // A thread copies 16 bytes of rows ``row``, ``row + ROWS``, ... of x; 16-byte chunks are swizzled as wgmma expects.
  constexpr int CHUNKS = STAGE_K_BLOCKS * 2, ROWS = THREADS / CHUNKS, COPIES = (TOKENS + ROWS - 1) / ROWS;
  static_assert(THREADS % CHUNKS == 0 && ROWS % 8 == 0, "");
  const int row = thread / CHUNKS, chunk = thread % CHUNKS;
  u32 x_to = memory + (chunk >> 3) * X_TILE_BYTES + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
  const char *x_from = (const char *)(x + (size_t)row * K + ((size_t)first * STAGE_K_BLOCKS * 16 + chunk * 8));
  const u32 x_rows = (u32)ROWS * K * 2;

  // In each stage, a warp multiplies the K_BLOCKS k-blocks from number group * K_BLOCKS on, and each lane copies the
  // weights that it reads. The distances of their addresses from ``weight_from`` are odd multiples of half a k-block,
  // so that one instruction computes each address.
  const u32 half_k_block = (u32)tiles * 256;
  const size_t k_block = (size_t)first * STAGE_K_BLOCKS + group * K_BLOCKS;
  const char *weight_from = (const char *)(weight + (k_block * tiles + tile) * 32 + lane) - (size_t)3 * half_k_block;
  const char *scale_from = (const char *)(scale + ((k_block + (lane >> 2)) * tiles + tile) * 4 + (lane & 3));
  u32 weight_at = memory + X_ALL + warp * WARP_BYTES + lane * 16;
  u32 scale_at = memory + X_ALL + warp * WARP_BYTES + K_BLOCKS * 512 + lane * 8;  // where this lane reads scales
  u32 bf16_to = memory + X_ALL + STAGES * STAGE + warp * K_BLOCKS * 128 + lane * 16;
  u32 bf16_from = memory + X_ALL + STAGES * STAGE + warp * K_BLOCKS * 128 + (lane >> 2) * 16;
  keep(x_to), keep(weight_at), keep(scale_at), keep(bf16_to), keep(bf16_from);

#pragma unroll
  for (int i = 0; i < COPIES; i++)  // rows past the last token stay zero in all stages
    if (row + i * ROWS >= tokens && row + i * ROWS < TOKENS)
      for (int stage = 0; stage < X_SLOTS * X_STAGES; stage++)
        *(uint4 *)((char *)shared + (x_to - memory) + stage * X_BYTES + i * ROWS * 128) = make_uint4(0, 0, 0, 0);

  // The following functions copy a stage to the slot at ``base`` and advance the pointers from which they copy.
  auto copy_x_of_stage = [&](int stage, u32 base) {
    if (stage >= last) return;
    const int left = k_blocks - stage * STAGE_K_BLOCKS;
    if (STAGE_K_BLOCKS <= 8 || left >= STAGE_K_BLOCKS) {  // K is a multiple of the k-blocks of such a short stage
#pragma unroll
      for (int i = 0; i < COPIES; i++)
        if (row + i * ROWS < tokens) copy_async(x_to + base + i * ROWS * 128, i ? advance(x_from, i, x_rows) : x_from);
    } else {  // past K, x is zero
      const bool inside = chunk < left * 2;
#pragma unroll
      for (int i = 0; i < COPIES; i++)
        if (row + i * ROWS < tokens)
          copy_async_or_zero(x_to + base + i * ROWS * 128, inside ? advance(x_from, i, x_rows) : (const char *)x,
                             inside);
    }
    x_from += STAGE_K_BLOCKS * 32;
  };
  auto copy_x = [&](int stage, u32 base) {
#pragma unroll
    for (int i = 0; i < X_STAGES; i++) copy_x_of_stage(stage + i, base + i * X_BYTES);
  };
  auto copy_weight = [&](int stage, u32 base) {
    if (stage >= last) return;
    const int left = k_blocks - stage * STAGE_K_BLOCKS;
    if (STAGE_K_BLOCKS <= 8 || left >= STAGE_K_BLOCKS) {
#pragma unroll
      for (int i = 0; i < K_BLOCKS; i++)
        copy_async(weight_at + base + i * 512, advance(weight_from, 3 + 2 * i, half_k_block));
      if (K_BLOCKS == 8 || lane < 4 * K_BLOCKS) copy_async(weight_at + base + K_BLOCKS * 512, scale_from);
    } else {  // past K, weights keep old bits, which always decode to finite numbers
#pragma unroll
      for (int i = 0; i < K_BLOCKS; i++)
        if (group * K_BLOCKS + i < left)
          copy_async(weight_at + base + i * 512, advance(weight_from, 3 + 2 * i, half_k_block));
      if ((K_BLOCKS == 8 || lane < 4 * K_BLOCKS) && group * K_BLOCKS + (lane >> 2) < left)
        copy_async(weight_at + base + K_BLOCKS * 512, scale_from);
    }
    weight_from = advance(weight_from, 2 * STAGE_K_BLOCKS, half_k_block);
    scale_from = advance(scale_from, STAGE_K_BLOCKS, (u32)tiles * 64);
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) copy_weight(first + i, i * STAGE);
  if (adapter.hidden && blockIdx.y == 0) {
    prefetch_b<128, THREADS>(adapter, first_half, N);
    prefetch_b<128, THREADS>(adapter, second_half, N);
  }
  wait_for_kernel_before();  // the previous kernel may have written x
#pragma unroll
  for (int i = 0; i < X_SLOTS - 1; i++) copy_x(first + i * X_STAGES, i * X_SLOT);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) end_copies();  // the first wait below is for all of them

  // wgmma's matrix descriptor of x: address, stride of 1024 bytes between groups of 8 tokens, 128-byte swizzle
  const u32 x_group = memory + group * (K_BLOCKS / 4) * X_TILE_BYTES;
  const u32 x_low = ((x_group & 0x3FFFFu) >> 4) | (1u << 16), x_high = (1024u >> 4) | (1u << 30);
  // For mma, a lane has the address of one row of one of the four 8 x 8 matrices that hold x of two k-blocks. Its
  // address for the next two k-blocks of a box differs in one bit.
  u32 x_row = x_group + (lane & 7) * 128 + (((lane >> 3) ^ (lane & 7)) << 4);
  keep(x_row);
  u32 fragments[2][4][4];  // of two k-blocks; one is dequantised while the other is multiplied
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 16; j++) fragments[i][j >> 2][j & 3] = 0;
  u32 base = 0, before = (STAGES - 1) * STAGE, x_base = 0, x_next = (X_SLOTS - 1) * X_SLOT;
#pragma unroll 1
  for (int stage = first; stage < last; stage++) {
    const bool new_x = (stage - first) % X_STAGES == 0;
    auto exchange_x = [&] {  // x of this stage is complete, and all warps are done with the oldest slot
      __syncthreads();
      copy_x(stage + (X_SLOTS - 1) * X_STAGES, x_next);
      x_next = x_next == X_ALL - X_SLOT ? 0 : x_next + X_SLOT;
    };
    wait_for_copies<STAGES - 2>();
    if (BY_MMA && new_x) exchange_x();
    if (!BY_MMA && new_x) make_visible_to_wgmma();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < K_BLOCKS / 4; i++) {  // each scale of the stage is converted by one lane
      const uint2 bytes = load_shared_8(scale_at + base + i * 256);
      uint4 pairs;
      scales_to_bf16(bytes.x, pairs.x, pairs.y);
      scales_to_bf16(bytes.y, pairs.z, pairs.w);
      store_shared_16(bf16_to + i * 512, pairs);
    }
    __syncwarp();
    uint4 next_words = load_shared_16(weight_at + base), next_scales = load_shared_16(bf16_from), columns;
#pragma unroll
    for (int i = 0; i < K_BLOCKS; i++) {
      const uint4 words = next_words, pairs = next_scales;
      if (i + 1 < K_BLOCKS) {
        next_words = load_shared_16(weight_at + base + (i + 1) * 512);
        next_scales = load_shared_16(bf16_from + (i + 1) * 128);
      }
      if (BY_MMA && i % 2 == 0) columns = load_matrices((x_row + x_base + i / 4 * X_TILE_BYTES) ^ (i % 4 << 5));
      u32(&fragment)[4][4] = fragments[i & 1];
      dequantize(fragment[0], words.x, low_twice(pairs.x), low_twice(pairs.y));
      dequantize(fragment[1], words.y, high_twice(pairs.x), high_twice(pairs.y));
      dequantize(fragment[2], words.z, low_twice(pairs.z), low_twice(pairs.w));
      dequantize(fragment[3], words.w, high_twice(pairs.z), high_twice(pairs.w));
      if (i == 0) {
        if constexpr (!BY_MMA) {
          wait_for_wgmmas<0>();
          keep(fragments[1]);
          if (new_x) exchange_x();
        }
        copy_weight(stage + STAGES - 1, before);
        end_copies();
        before = base;
      }
      if constexpr (BY_MMA) {
#pragma unroll
        for (int j = 0; j < 4; j++)
          multiply(sums[j], fragment[j], i % 2 ? columns.z : columns.x, i % 2 ? columns.w : columns.y);
      } else {
        keep(fragment);
        begin_wgmmas();
        const u64 here = ((u64)x_high << 32) | (x_low + (x_base >> 4) + i / 4 * (X_TILE_BYTES >> 4) + i % 4 * 2);
#pragma unroll
        for (int j = 0; j < 4; j++) wgmma(sums[j], fragment[j], here);
        end_wgmmas();
        if (i) {
          wait_for_wgmmas<1>();
          keep(fragments[(i + 1) & 1]);
        }
      }
    }
    base = base == (STAGES - 1) * STAGE ? 0 : base + STAGE;
    x_base = x_base == X_ALL - X_BYTES ? 0 : x_base + X_BYTES;
  }
  let_next_kernel_start();  // the next kernel waits until this one has ended before it reads y
  if (thread == 0) fetch_to_l2(next, blockIdx.y * blocks + block);  // memory would be idle until the next GEMM
  __syncwarp();  // wgmma and mma need all lanes
  const float factor = TO_VALUE * global_scale[0];
  wait_for_wgmmas<0>();
  keep(fragments[0]), keep(fragments[1]);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    keep(sums[j]);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) sums[j][i] *= factor;
  }
  wait_for_copies<0>();
  __syncthreads();
  if (adapter.hidden && group == 0)
    add_adapter<FRAGMENTS, TOKENS / 8, TOKENS / 8>(sums[0], adapter, tile * 64, 0, tokens, splits,
                                                   [&] { wait_for_hidden(shrink, splits); });

  // The sums, [TOKENS][260], are added over the warpgroups in order, then over the cluster's thread blocks in order.
  constexpr int PITCH = 260;
  float *group_sums = (float *)shared + group * (TOKENS * PITCH);
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
      const int output = warp % 4 * 64 + j * 16 + (lane >> 2) + (i >> 1 & 1) * 8;
      const int token = i / 4 * 8 + (lane & 3) * 2 + (i & 1);
      group_sums[token * PITCH + output] = sums[j][i];
    }
  if (GROUPS > 1) {
    __syncthreads();
    for (int i = thread; i < tokens * 64; i += THREADS) {
      float4 *four = (float4 *)((float *)shared + i / 64 * PITCH + i % 64 * 4), sum = *four;
#pragma unroll
      for (int other = 1; other < GROUPS; other++) {
        const float4 more = four[other * (TOKENS * PITCH / 4)];
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      *four = sum;
    }
  }
  if (splits > 1)
    synchronize_cluster();
  else
    __syncthreads();
  if (is_gated)
    store_gated_sums<THREADS, 8>(memory, y, tokens, block * 128, N / 2, splits);
  else
    store_sums_of_cluster<64, THREADS, 8>(memory, y, bias, tokens, block * 256, N, splits);
  if (adapter.hidden && thread == 0 && blockIdx.y < readers && atomicAdd(&hidden_read, 1u) + 1 == blocks * readers)
    hidden_written = hidden_read = 0;  // by the last one that has read h
  if (splits > 1) synchronize_cluster_without_memory();  // other thread blocks may still read this one's sums
}
