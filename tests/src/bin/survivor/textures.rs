//! Arrays, textures and surfaces of them and of device memory, and a graph that copies one.

use super::graphs::instantiate;
use super::{Status, memory, submit};
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use std::ffi::{CString, c_uint, c_void};
use std::ptr::null;

/// Elements of a row, rows, and slices. All elements are words.
const WIDTH: usize = 32;
const ROWS: usize = 16;
const SLICES: usize = 5;
const LEVELS: usize = 3;

/// `through` adds an element of a texture of two dimensions to thrice a word of a texture of memory and nine times an element of
/// a surface; `store` writes a surface.
const TEXT: &str = "
.version 7.0
.target sm_70
.address_size 64

.visible .entry through(.param .u64 out, .param .u64 plane, .param .u64 line, .param .u64 surface)
{
    .reg .b32 %r<20>;
    .reg .f32 %f<3>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [plane];
    ld.param.u64 %rd3, [line];
    ld.param.u64 %rd4, [surface];
    cvta.to.global.u64 %rd5, %rd1;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    cvt.rn.f32.u32 %f1, %r1;
    cvt.rn.f32.u32 %f2, %r2;
    tex.2d.v4.u32.f32 {%r4, %r5, %r6, %r7}, [%rd2, {%f1, %f2}];
    mad.lo.s32 %r8, %r2, %r3, %r1;
    tex.1d.v4.u32.s32 {%r9, %r10, %r11, %r12}, [%rd3, {%r8}];
    shl.b32 %r13, %r1, 2;
    suld.b.2d.b32.trap {%r14}, [%rd4, {%r13, %r2}];
    mad.lo.s32 %r15, %r9, 3, %r4;
    mad.lo.s32 %r16, %r14, 9, %r15;
    mul.wide.u32 %rd6, %r8, 4;
    add.s64 %rd7, %rd5, %rd6;
    st.global.u32 [%rd7], %r16;
    ret;
}

.visible .entry store(.param .u64 surface, .param .u32 seed)
{
    .reg .b32 %r<8>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [surface];
    ld.param.u32 %r1, [seed];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mad.lo.s32 %r5, %r3, %r4, %r2;
    mul.lo.s32 %r6, %r5, %r1;
    shl.b32 %r7, %r2, 2;
    sust.b.2d.b32.trap [%rd1, {%r7, %r3}], {%r6};
    ret;
}
";

/// An array with its content, in words.
struct Array {
    array: CUarray,
    size: [usize; 3],
    content: Vec<u32>,
}

impl Array {
    fn new(size: [usize; 3]) -> Status<Array> {
        let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
            width: size[0] as u64,
            height: size[1] as u64,
            depth: size[2] as u64,
            format: CU_AD_FORMAT_UNSIGNED_INT32,
            channels: 1,
            flags: CUDA_ARRAY3D_SURFACE_LDST,
            pad: 0,
        };
        let mut array = CUarray::NULL;
        cu!(cuArray3DCreate_v2, &mut array, &raw const descriptor).ok()?;
        Ok(Array::of(array, size))
    }

    fn of(array: CUarray, size: [usize; 3]) -> Array {
        let size = size.map(|one| one.max(1));
        Array {
            array,
            size,
            content: vec![0; size.iter().product()],
        }
    }

    fn copy(&self) -> CUDA_MEMCPY3D {
        let [width, height, depth] = self.size.map(|one| one as u64);
        CUDA_MEMCPY3D {
            src_array: self.array.0,
            dst_array: self.array.0,
            src_pitch: 4 * width,
            dst_pitch: 4 * width,
            src_height: height,
            dst_height: height,
            width: 4 * width,
            height,
            depth,
            ..CUDA_MEMCPY3D::default()
        }
    }

    fn write(&mut self, seed: u32) -> Status {
        let words = self.content.iter_mut().zip(1u32..);
        words.for_each(|(word, at)| *word = at.wrapping_mul(seed));
        let copy = CUDA_MEMCPY3D {
            src_type: CU_MEMORYTYPE_HOST,
            src_host: self.content.as_ptr() as u64,
            dst_type: CU_MEMORYTYPE_ARRAY,
            ..self.copy()
        };
        cu!(cuMemcpy3D_v2, &raw const copy).ok()
    }

    fn is_right(&self) -> Status<bool> {
        let mut found = vec![0u32; self.content.len()];
        let copy = CUDA_MEMCPY3D {
            src_type: CU_MEMORYTYPE_ARRAY,
            dst_type: CU_MEMORYTYPE_HOST,
            dst_host: found.as_mut_ptr() as u64,
            ..self.copy()
        };
        cu!(cuMemcpy3D_v2, &raw const copy).ok()?;
        Ok(found == self.content)
    }

    fn resource(&self) -> CUDA_RESOURCE_DESC {
        resource(CU_RESOURCE_TYPE_ARRAY, &[self.array.0])
    }
}

fn resource(kind: u32, words: &[u64]) -> CUDA_RESOURCE_DESC {
    let mut resource = CUDA_RESOURCE_DESC {
        kind,
        ..CUDA_RESOURCE_DESC::default()
    };
    resource.words[..words.len()].copy_from_slice(words);
    resource
}

fn texture(resource: &CUDA_RESOURCE_DESC) -> Status<CUtexObject> {
    let description = CUDA_TEXTURE_DESC {
        address_mode: [CU_TR_ADDRESS_MODE_CLAMP; 3],
        flags: CU_TRSF_READ_AS_INTEGER,
        ..CUDA_TEXTURE_DESC::default()
    };
    let mut object = CUtexObject::NULL;
    let view = null::<CUDA_RESOURCE_VIEW_DESC>();
    cu!(
        cuTexObjectCreate,
        &mut object,
        &raw const *resource,
        &raw const description,
        view
    )
    .ok()?;
    Ok(object)
}

fn surface(array: &Array) -> Status<CUsurfObject> {
    let mut object = CUsurfObject::NULL;
    let resource = array.resource();
    cu!(cuSurfObjectCreate, &mut object, &raw const resource).ok()?;
    Ok(object)
}

/// Words of device memory.
fn line(words: usize) -> Status<(CUdeviceptr, CUDA_RESOURCE_DESC)> {
    let at = memory(4 * words)?;
    let format = u64::from(CU_AD_FORMAT_UNSIGNED_INT32) | 1 << 32;
    let words = [at, format, 4 * words as u64];
    Ok((at, resource(CU_RESOURCE_TYPE_LINEAR, &words)))
}

/// Its objects, and what they should hold.
pub struct Textures {
    through: CUfunction,
    store: CUfunction,
    out: CUdeviceptr,
    plane: Array,
    drawn: Array,
    volume: Array,
    /// One more, made anew each round.
    changing: Array,
    levels: Vec<Array>,
    line: CUdeviceptr,
    words: Vec<u32>,
    of_plane: CUtexObject,
    of_line: CUtexObject,
    of_drawn: CUsurfObject,
    /// Textures that are destroyed, oldest first.
    others: Vec<CUtexObject>,
    /// A texture whose memory is freed.
    _dangling: CUtexObject,
    /// Copies the volume to `copied`.
    copies: CUgraphExec,
    copied: CUdeviceptr,
    round: u32,
}

impl Textures {
    /// # Errors
    /// A call's status.
    pub fn new() -> Status<Textures> {
        let text = CString::new(TEXT).expect("no NUL");
        let mut module = CUmodule::NULL;
        cu!(cuModuleLoadData, &mut module, text.as_ptr()).ok()?;
        let (mut through, mut store) = (CUfunction::NULL, CUfunction::NULL);
        cu!(
            cuModuleGetFunction,
            &mut through,
            module,
            c"through".as_ptr()
        )
        .ok()?;
        cu!(cuModuleGetFunction, &mut store, module, c"store".as_ptr()).ok()?;
        let plane = Array::new([WIDTH, ROWS, 0])?;
        let drawn = Array::new([WIDTH, ROWS, 0])?;
        let of_volume = Array::new([7, 6, SLICES])?;
        let others = (0..4).map(|_| texture(&of_volume.resource()));
        let others = others.collect::<Status<Vec<_>>>()?;
        let (line_at, of_words) = line(WIDTH * ROWS)?;
        let (freed, of_freed) = line(64)?;
        let dangling = texture(&of_freed)?;
        cu!(cuMemFree_v2, freed).ok()?;
        let copied = memory(4 * of_volume.content.len())?;
        let mut textures = Textures {
            copies: copy_of(&of_volume, copied)?,
            copied,
            through,
            store,
            out: memory(4 * WIDTH * ROWS)?,
            of_plane: texture(&plane.resource())?,
            of_line: texture(&of_words)?,
            of_drawn: surface(&drawn)?,
            plane,
            drawn,
            volume: of_volume,
            changing: Array::new([100, 0, 0])?,
            levels: levels()?,
            line: line_at,
            words: vec![0; WIDTH * ROWS],
            others,
            _dangling: dangling,
            round: 0,
        };
        textures.change()?;
        Ok(textures)
    }

    fn run(&self, function: CUfunction, params: &mut [*mut c_void]) -> Status {
        let grid = (ROWS as u32, WIDTH as u32);
        submit(function, grid, CUstream::NULL, params)
    }

    /// Whether all arrays hold what they held, by kernels and by copies.
    fn is_right(&self) -> Status<bool> {
        let (mut out, mut plane, mut line) = (self.out, self.of_plane, self.of_line);
        let mut drawn = self.of_drawn;
        let mut params: [*mut c_void; 4] = [
            (&raw mut out).cast(),
            (&raw mut plane).cast(),
            (&raw mut line).cast(),
            (&raw mut drawn).cast(),
        ];
        self.run(self.through, &mut params)?;
        let mut found = vec![0u32; WIDTH * ROWS];
        cu!(
            cuMemcpyDtoH_v2,
            found.as_mut_ptr(),
            self.out,
            4 * found.len()
        )
        .ok()?;
        let expected = |at: usize| {
            let line = self.words[at].wrapping_mul(3);
            let drawn = self.drawn.content[at].wrapping_mul(9);
            self.plane.content[at]
                .wrapping_add(line)
                .wrapping_add(drawn)
        };
        let arrays = [&self.plane, &self.drawn, &self.volume, &self.changing];
        for array in arrays.into_iter().chain(&self.levels) {
            if !array.is_right()? {
                return Ok(false);
            }
        }
        cu!(cuGraphLaunch, self.copies, CUstream::NULL).ok()?;
        let mut copied = vec![0u32; self.volume.content.len()];
        let bytes = 4 * copied.len();
        cu!(cuMemcpyDtoH_v2, copied.as_mut_ptr(), self.copied, bytes).ok()?;
        let is_copied = copied == self.volume.content;
        Ok(is_copied && (0..found.len()).all(|at| found[at] == expected(at)))
    }

    fn change(&mut self) -> Status {
        let seed = self.round.wrapping_mul(0x9e37_79b9) | 1;
        self.plane.write(seed)?;
        self.volume.write(seed ^ 2)?;
        let (mut drawn, mut by) = (self.of_drawn, seed ^ 4);
        let mut params: [*mut c_void; 2] = [(&raw mut drawn).cast(), (&raw mut by).cast()];
        self.run(self.store, &mut params)?;
        let words = self.drawn.content.iter_mut().zip(0u32..);
        words.for_each(|(word, at)| *word = at.wrapping_mul(by));
        cu!(cuArrayDestroy, self.changing.array).ok()?;
        self.changing = Array::new([100 + self.round as usize % 3, 0, 0])?;
        self.changing.write(seed ^ 8)?;
        for (level, by) in self.levels.iter_mut().zip(16..) {
            level.write(seed ^ by)?;
        }
        let words = self.words.iter_mut().zip(5u32..);
        words.for_each(|(word, at)| *word = at.wrapping_mul(seed ^ 32));
        let bytes = 4 * self.words.len();
        cu!(cuMemcpyHtoD_v2, self.line, self.words.as_ptr(), bytes).ok()?;
        // The numbers of textures get gaps.
        let oldest = self.others.remove(0);
        cu!(cuTexObjectDestroy, oldest).ok()?;
        if self.round.is_multiple_of(2) {
            self.others.push(texture(&self.volume.resource())?);
            self.others.push(texture(&self.plane.resource())?);
        }
        // Copies of pageable memory may return before they are complete.
        cu!(cuCtxSynchronize).ok()
    }

    /// The number of rounds, or `None` if an array does not hold what it held.
    ///
    /// # Errors
    /// A call's status.
    pub fn round(&mut self) -> Status<Option<u32>> {
        if !self.is_right()? {
            return Ok(None);
        }
        self.round += 1;
        self.change()?;
        Ok(Some(self.round))
    }
}

/// An instance of a captured graph that copies an array to device memory.
fn copy_of(array: &Array, to: CUdeviceptr) -> Status<CUgraphExec> {
    let mut stream = CUstream::NULL;
    cu!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING).ok()?;
    let mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    cu!(cuStreamBeginCapture_v2, stream, mode).ok()?;
    let copy = CUDA_MEMCPY3D {
        src_type: CU_MEMORYTYPE_ARRAY,
        dst_type: CU_MEMORYTYPE_DEVICE,
        dst_device: to,
        ..array.copy()
    };
    cu!(cuMemcpy3DAsync_v2, &raw const copy, stream).ok()?;
    let mut graph = CUgraph::NULL;
    cu!(cuStreamEndCapture, stream, &mut graph).ok()?;
    instantiate(graph)
}

/// The levels of a mipmapped array.
fn levels() -> Status<Vec<Array>> {
    let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
        width: WIDTH as u64,
        height: ROWS as u64,
        format: CU_AD_FORMAT_UNSIGNED_INT32,
        channels: 1,
        ..CUDA_ARRAY3D_DESCRIPTOR::default()
    };
    let mut mipmap = CUmipmappedArray::NULL;
    cu!(
        cuMipmappedArrayCreate,
        &mut mipmap,
        &raw const descriptor,
        LEVELS as c_uint
    )
    .ok()?;
    let level = |index: usize| {
        let mut level = CUarray::NULL;
        let get = cu!(
            cuMipmappedArrayGetLevel,
            &mut level,
            mipmap,
            index as c_uint
        );
        get.ok()?;
        Ok(Array::of(level, [WIDTH >> index, ROWS >> index, 0]))
    };
    (0..LEVELS).map(level).collect()
}
