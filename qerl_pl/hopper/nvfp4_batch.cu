// GEMM y = x W^T of bf16 inputs and NVFP4 weights for up to 2048 tokens on Hopper; nvfp4_batch.py documents arguments.
//
// Names: a k-block is 16 inputs, a tile 64 outputs, a stage 8 k-blocks of all tiles of a thread block. Each tile is
// computed by one warpgroup, and each of its warps converts 16 outputs of a k-block to bf16. One wgmma takes the
// weights of the warpgroup's 64 outputs from registers and all tokens of the thread block from shared memory.
// Warpgroups wait for stages and not for each other, so the tensor cores multiply for some while others convert
// weights. The thread blocks that compute the same outputs and tokens over different parts of the inputs form a
// cluster, which adds up its sums in shared memory. If the inputs are not split, the first ``wide`` thread blocks along
// the outputs have all TILES tiles, and the others have one fewer.

struct alignas(64) TensorMap {  // the TMA descriptor: a tensor in memory, and the boxes in which it is copied
  char bytes[128];
};

FUNCTION void begin_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

FUNCTION void arrive_and_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

FUNCTION void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory"); }

FUNCTION void wait_for(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra READY;\nbra AGAIN;\n"
      "READY:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

FUNCTION void prefetch(const TensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

FUNCTION void copy_box(u32 to, const TensorMap *map, int x, int y, int z, u32 barrier) {  // 0 past the tensor
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// Shared memory: STAGES times [x: two boxes of 64 inputs, [TOKENS][128 bytes]; weights [8][TILES][512 bytes]; scales
// [8][TILES][64 bytes]], then for each warp 8 k-blocks x 32 bytes of bf16 scales, then for each stage a barrier on
// which warps wait until it is filled and a barrier on which the copying thread waits until it has been read. At the
// end the sums overwrite the stages.
template <int TOKENS, int TILES, int STAGES>
FUNCTION void nvfp4_batch(const TensorMap *x, const TensorMap *weight, const TensorMap *scale,
                          const float *global_scale, const u16 *bias, u16 *y, int tokens, int N, int K, int splits,
                          int wide, Adapter adapter) {
  extern __shared__ __align__(1024) uint4 shared[];
  constexpr int WARPS = TILES * 4, THREADS = WARPS * 32, K_BLOCKS = 8;
  constexpr int X_TILE_BYTES = TOKENS * 128, WEIGHTS = 2 * X_TILE_BYTES, SCALES = WEIGHTS + K_BLOCKS * TILES * 512;
  constexpr int BYTES = SCALES + K_BLOCKS * TILES * 64, STAGE = (BYTES + 1023) / 1024 * 1024, CONVERTED = K_BLOCKS * 32;
  // Buffers of converted weights, as many as registers allow: one is filled while the others are multiplied.
  constexpr int BUFFERS = TILES < 5 && TOKENS < 256 ? 4 : 2;

  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xFFFFFFFFu, thread >> 5, 0), tile = warp / 4;
  const int stages = (K + K_BLOCKS * 16 - 1) / (K_BLOCKS * 16);  // TMA fills the last one with zeros past K
  const int first = (int)((long long)stages * blockIdx.y / splits);
  const int last = (int)((long long)stages * (blockIdx.y + 1) / splits);
  const int first_tile = blockIdx.x * (TILES - 1) + min((int)blockIdx.x, wide), first_token = blockIdx.z * TOKENS;
  const int tiles = blockIdx.x < wide ? TILES : TILES - 1;  // the last warpgroup of a narrow block has no tile
  const u32 memory = (u32)__cvta_generic_to_shared(shared);
  const u32 full = memory + STAGES * STAGE + WARPS * CONVERTED, read = full + STAGES * 8;

  auto copy_stage = [&](int stage, u32 slot) {  // called by one thread
    const u32 to = memory + slot * STAGE, barrier = full + slot * 8;
    arrive_and_expect(barrier, BYTES);
    copy_box(to, x, 0, first_token, stage * (K_BLOCKS / 4), barrier);
    copy_box(to + WEIGHTS, weight, 0, first_tile, stage * K_BLOCKS, barrier);
    copy_box(to + SCALES, scale, 0, first_tile, stage * K_BLOCKS, barrier);
  };
  if (thread == 0) {
    prefetch(x), prefetch(weight), prefetch(scale);
    for (int i = 0; i < STAGES; i++) begin_barrier(full + i * 8, 1), begin_barrier(read + i * 8, tiles * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    make_visible_to_wgmma();  // and to TMA
    for (int i = 0; i < STAGES && first + i < last; i++) copy_stage(first + i, i);
  }
  if (adapter.hidden && blockIdx.y == 0) prefetch_b<TILES * 64, THREADS>(adapter, first_tile * 64, N);
  __syncthreads();

  float sums[TOKENS / 2];
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0.f;
  u32 fragments[BUFFERS][4];
#pragma unroll
  for (int i = 0; i < BUFFERS * 4; i++) fragments[i / 4][i % 4] = 0;

  // Each lane reads one word of codes per k-block, which belongs to two of the warp's 16 outputs. In each stage, it
  // also converts scales for the warp: those of four of the 16 outputs in k-block lane / 4.
  u32 word_at = memory + WEIGHTS + tile * 512 + lane * 16 + warp % 4 * 4;
  const u32 scale_at = memory + SCALES + (lane >> 2) * (TILES * 64) + tile * 64 + (lane & 3) * 16 + warp % 4 * 2;
  const u32 converted = memory + STAGES * STAGE + warp * CONVERTED;
  const u32 pair_to = converted + lane * 8;
  u32 pair_at = converted + (lane >> 2) * 4;  // scales of outputs g and g + 8
  keep(word_at), keep(pair_at);
  // wgmma's matrix descriptor of x: address, stride of 1024 bytes between groups of 8 tokens, 128-byte swizzle
  const u32 x_low = ((memory & 0x3FFFFu) >> 4) | (1u << 16), x_high = (1024u >> 4) | (1u << 30);

  u32 slot = 0, parity = 0;
#pragma unroll 1
  for (int stage = tile < tiles ? first : last; stage < last; stage++) {
    const u32 base = slot * STAGE, before = slot ? slot - 1 : STAGES - 1;
    wait_for(full + slot * 8, parity);
    u32 even, odd;
    scales_to_bf16(load_shared_2(scale_at + base) | (load_shared_2(scale_at + base + 8) << 16), even, odd);
    store_shared_8(pair_to, __byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
    __syncwarp();
    u32 next_word = load_shared_4(word_at + base), next_pair = load_shared_4(pair_at);
#pragma unroll
    for (int i = 0; i < K_BLOCKS; i++) {
      const u32 word = next_word, pair = next_pair;
      if (i + 1 < K_BLOCKS) {
        next_word = load_shared_4(word_at + base + (i + 1) * (TILES * 512));
        next_pair = load_shared_4(pair_at + (i + 1) * 32);
      }
      u32(&fragment)[4] = fragments[i % BUFFERS];
      dequantize(fragment, word, low_twice(pair), high_twice(pair));
      keep(fragment);
      begin_wgmmas();
      wgmma(sums, fragment, ((u64)x_high << 32) | (x_low + (base >> 4) + (i >> 2) * (X_TILE_BYTES >> 4) + (i & 3) * 2));
      end_wgmmas();
      wait_for_wgmmas<BUFFERS - 1>();
      keep(fragments[(i + 1) % BUFFERS]);
      if (i == BUFFERS - 2 && lane == 0 && stage > first) arrive(read + before * 8);
    }
    __syncwarp();  // all lanes have read this stage's scales
    if (thread == 0 && stage > first && stage - 1 + STAGES < last) {
      wait_for(read + before * 8, slot ? parity : parity ^ 1);
      copy_stage(stage - 1 + STAGES, before);
    }
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  const float factor = TO_VALUE * global_scale[0];
  wait_for_wgmmas<0>();
  keep(fragments), keep(sums);
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) sums[i] *= factor;
  __syncthreads();  // all stages have been read
  const int n = first_tile * 64 + warp * 16;
  constexpr int IN_FLIGHT = TOKENS == 64 ? 8 : TOKENS == 96 ? 6 : TILES < 5 ? 8 : 4;  // as many as registers allow
  if (adapter.hidden && n < N && tile < tiles)
    add_adapter<1, TOKENS / 8, IN_FLIGHT>(sums, adapter, n, first_token, tokens, splits,
                                          [] { wait_for_kernel_before(); });  // the previous kernel writes h

  constexpr int PITCH = TILES * 64 + 4, FOURS = TILES * 16;
  float *block_sums = (float *)shared;
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) {
    const int token = i / 4 * 8 + (lane & 3) * 2 + (i & 1);
    block_sums[token * PITCH + warp * 16 + (lane >> 2) + (i >> 1 & 1) * 8] = sums[i];
  }
  __syncthreads();
  const int here = min(tokens - first_token, TOKENS);
  y += (size_t)first_token * N;
  if (splits == 1) {
#pragma unroll 4
    for (int part = thread; part < here * FOURS; part += THREADS) {
      const int token = part / FOURS, output = part % FOURS * 4;
      if (output >= tiles * 64) continue;  // those outputs belong to the next thread block
      store_outputs(y, bias, token, first_tile * 64 + output, N,
                    *(const float4 *)(block_sums + token * PITCH + output));
    }
    return;
  }
  synchronize_cluster();
  store_sums_of_cluster<FOURS, THREADS, 4>(memory, y, bias, here, first_tile * 64, N, splits);
  synchronize_cluster();  // other thread blocks may still read this one's sums
}
