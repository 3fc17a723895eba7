// h = x A^T of LoRA adapters, for the kernels that compute it. Needs hopper.cuh and nvfp4.cuh.

// Prefetches up to 32 rows of A, from row ``first_rank`` on, to L2. Each of ``parts`` threads calls this with its index
// ``part``.
FUNCTION void prefetch_a(const u16 *a, int K, int first_rank, int rank, int part, int parts) {
  constexpr int LINE = 64;  // numbers per cache line
  const int size = min(rank - first_rank, 32) * K;
  for (int i = part * LINE; i < size; i += parts * LINE) prefetch_to_l2(a + (size_t)first_rank * K + i);
}

// Computes h = x A^T for one tile of tokens and 32 ranks, by the thread blocks of a cluster (along y). Each thread
// block has WARPS warps for each slice of the adapter, that is, for each of the linear layers that are fused into one.
// ``a`` is the matrix A of this warp's slice, and ``hidden`` is h of the first slice.
//
// A chunk is 32 inputs. A lane loads 8 contiguous inputs of a chunk and passes them to two mma instructions; the order
// of the inputs within a chunk does not matter, because A and x are loaded in the same order. Each warp of a slice has
// its own chunks. A thread block adds up its warps' sums in shared memory, [warps][TOKENS][36] fp32, and the cluster
// adds up those of its thread blocks. When the function returns, other thread blocks may still read this one's sums.
template <int TOKENS, int SLICES, int WARPS, int IN_FLIGHT, int SUMS_IN_FLIGHT>
FUNCTION void shrink_tile(const u16 *x, const u16 *a, const long long *indices, u16 *hidden, int tokens, int K,
                          int rank, int splits, int first_token, int first_rank) {
  extern __shared__ __align__(1024) uint4 shared[];
  constexpr int THREADS = SLICES * WARPS * 32, RANKS = 32, PITCH = RANKS + 4, TILES = TOKENS / 8;
  const int thread = threadIdx.x, lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int warp = __shfl_sync(0xFFFFFFFFu, thread >> 5, 0);
  const int chunks = K / 32, step = splits * WARPS;

  float sums[2][TILES][4];  // this lane's part of 2 x TILES products of 16 ranks x 8 tokens
#pragma unroll
  for (int i = 0; i < 2 * TILES * 4; i++) sums[i / (TILES * 4)][i / 4 % TILES][i % 4] = 0.f;
  for (int chunk = blockIdx.y * WARPS + warp % WARPS; chunk < chunks; chunk += IN_FLIGHT * step) {
    uint4 rows[IN_FLIGHT][4], columns[IN_FLIGHT][TILES];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      const int at = chunk + i * step, k = at * 32 + c * 8;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int r = first_rank + j * 8 + g;
        rows[i][j] = load_16_or_zero(a + (size_t)r * K + k, at < chunks && r < rank);
      }
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const int token = first_token + j * 8 + g;
        columns[i][j] = load_16_or_zero(x + (size_t)token * K + k, at < chunks && token < tokens);
      }
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++)
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        multiply_chunk(sums[0][j], rows[i][0], rows[i][1], columns[i][j]);
        multiply_chunk(sums[1][j], rows[i][2], rows[i][3], columns[i][j]);
      }
  }

  float *warp_sums = (float *)shared + warp * (TOKENS * PITCH);
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        warp_sums[(j * 8 + c * 2 + (k & 1)) * PITCH + i * 16 + (k >> 1) * 8 + g] = sums[i][j][k];
  __syncthreads();
  constexpr int FOURS = RANKS / 4;
  for (int part = thread; part < SLICES * TOKENS * FOURS; part += THREADS) {  // sum over the slice's warps
    const int of_slice = part / (TOKENS * FOURS), token = part / FOURS % TOKENS;
    float4 *four = (float4 *)((float *)shared + (of_slice * WARPS * TOKENS + token) * PITCH + part % FOURS * 4);
    float4 sum = *four;
#pragma unroll
    for (int i = 1; i < WARPS; i++) {
      const float4 more = four[i * (TOKENS * PITCH / 4)];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    *four = sum;
  }
  synchronize_cluster();
  const u32 memory = (u32)__cvta_generic_to_shared(shared);
  for (int part = thread * splits + blockIdx.y; part < SLICES * TOKENS * FOURS; part += splits * THREADS) {
    const int of_slice = part / (TOKENS * FOURS), token = part / FOURS % TOKENS, r = part % FOURS * 4;
    if (first_token + token >= tokens || first_rank + r >= rank) continue;
    const u32 address = memory + ((of_slice * WARPS * TOKENS + token) * PITCH + r) * 4;
    const float4 sum = sum_of_cluster<SUMS_IN_FLIGHT>(address, splits);
    const bool with_adapter = indices[first_token + token] >= 0;
    u16 *to = hidden + ((size_t)of_slice * tokens + first_token + token) * rank + first_rank + r;
    *(uint2 *)to = with_adapter ? four_to_bf16(sum) : make_uint2(0, 0);
  }
}
