//! Texture and surface references of modules from before there were texture objects. They live in the driver.

use std::ffi::{CStr, CString};

use mpsshim_api::cuda::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_OUT_OF_MEMORY, CUdeviceptr, CUresult,
};
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::Op;
use mpsshim_proto::message::array::{
    GetReference, ReferenceArguments, ReferenceCall as Call, ReferenceResult,
};
use parking_lot::Mutex;

use super::entries;
use crate::ffi::{In, Out, Status, Text, guard};
use crate::proxy::array;
use crate::proxy::context::{self, Context};
use crate::proxy::module;
use crate::proxy::objects::Table;
use crate::proxy::submit::session;

entries! {
    cuModuleGetTexRef(_, _, _) => get_texture,
    cuModuleGetSurfRef(_, _, _) => get_surface,
    cuTexRefCreate(_) => create,
    cuTexRefDestroy(_) => destroy,
    cuTexRefSetArray(_, _, _) => set_array,
    cuTexRefSetMipmappedArray(_, _, _) => set_mipmapped_array,
    cuTexRefSetAddress_v2(_, _, _, _) => set_address,
    cuTexRefSetAddress2D_v2(_, _, _, _) => set_address_2d,
    cuTexRefSetAddress2D_v3(_, _, _, _) => set_address_2d,
    cuTexRefSetFormat(_, _, _) => set_format,
    cuTexRefSetAddressMode(_, _, _) => set_address_mode,
    cuTexRefSetFilterMode(_, _) => set_filter_mode,
    cuTexRefSetMipmapFilterMode(_, _) => set_mipmap_filter_mode,
    cuTexRefSetMipmapLevelBias(_, _) => set_mipmap_level_bias,
    cuTexRefSetMipmapLevelClamp(_, _, _) => set_mipmap_level_clamp,
    cuTexRefSetMaxAnisotropy(_, _) => set_max_anisotropy,
    cuTexRefSetBorderColor(_, _) => set_border_color,
    cuTexRefSetFlags(_, _) => set_flags,
    cuTexRefGetAddress_v2(_, _) => get_address,
    cuTexRefGetArray(_, _) => get_array,
    cuTexRefGetMipmappedArray(_, _) => get_mipmapped_array,
    cuTexRefGetAddressMode(_, _, _) => get_address_mode,
    cuTexRefGetFilterMode(_, _) => get_filter_mode,
    cuTexRefGetFormat(_, _, _) => get_format,
    cuTexRefGetMipmapFilterMode(_, _) => get_mipmap_filter_mode,
    cuTexRefGetMipmapLevelBias(_, _) => get_mipmap_level_bias,
    cuTexRefGetMipmapLevelClamp(_, _, _) => get_mipmap_level_clamp,
    cuTexRefGetMaxAnisotropy(_, _) => get_max_anisotropy,
    cuTexRefGetBorderColor(_, _) => get_border_color,
    cuTexRefGetFlags(_, _) => get_flags,
    cuSurfRefSetArray(_, _, _) => surface_set_array,
    cuSurfRefGetArray(_, _) => surface_get_array,
    cuParamSetTexRef(_, _, _) => param_set,
}

/// The handle of a reference's module, its name, and the handle of its context.
type Origin = Mutex<Option<(u64, CString, u64)>>;

static TEXTURES: Table<Origin> = Table::new(Kind::TextureReference);
static SURFACES: Table<Origin> = Table::new(Kind::SurfaceReference);

/// Finds a module's reference, or makes one of no module (0). The same name gives the same handle.
fn find(table: &'static Table<Origin>, module: u64, name: &CStr) -> Status<u64> {
    let session = session()?;
    let (parent, context) = match module {
        0 => (0, context::current()?),
        module => module::on_server(module)?,
    };
    let is_it = |handle: &u64| {
        let entry = table.get(*handle);
        entry.is_some_and(|entry| {
            let origin = entry.lock();
            origin
                .as_ref()
                .is_some_and(|(of, known, _)| *of == module && **known == *name)
        })
    };
    if module != 0
        && let Some(known) = table.handles().into_iter().find(is_it)
    {
        return Ok(known);
    }
    let entry = table.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let body = GetReference {
        module: parent,
        reference: table.handle_of(entry),
        device: context.server_device,
        pad: 0,
    };
    let answer = session.request(Op::GetReference, &body, name.to_bytes_with_nul());
    match answer.and_then(|answer| answer.status.ok()) {
        Ok(()) => {
            *entry.lock() = Some((module, name.to_owned(), context.handle));
            Ok(table.publish(entry))
        }
        Err(status) => {
            table.recycle(entry);
            Err(status)
        }
    }
}

/// `cuModuleGetTexRef`.
pub unsafe extern "C" fn get_texture(out: Out<u64>, module: u64, name: Text) -> CUresult {
    guard(|| {
        module::check(module)?;
        out.required()?;
        out.set(find(&TEXTURES, module, name.get()?)?)
    })
}

/// `cuModuleGetSurfRef`.
pub unsafe extern "C" fn get_surface(out: Out<u64>, module: u64, name: Text) -> CUresult {
    guard(|| {
        module::check(module)?;
        out.required()?;
        out.set(find(&SURFACES, module, name.get()?)?)
    })
}

/// `cuTexRefCreate`.
pub unsafe extern "C" fn create(out: Out<u64>) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        out.set(find(&TEXTURES, 0, c"")?)
    })
}

fn table_of(reference: u64) -> &'static Table<Origin> {
    if Handle(reference).kind() == Some(Kind::SurfaceReference) {
        &SURFACES
    } else {
        &TEXTURES
    }
}

/// Checks that a reference exists. `CUDA_ERROR_INVALID_HANDLE`.
fn check(reference: u64) -> Status {
    table_of(reference).find(reference).map(drop)
}

/// One call on a reference, with its arguments as words.
fn call(reference: u64, call: Call, arguments: &[u64]) -> Status<[u64; 4]> {
    check(reference)?;
    let mut words = [0; 6];
    words[..arguments.len()].copy_from_slice(arguments);
    let body = ReferenceArguments {
        reference,
        words,
        call: call as u32,
        pad: 0,
    };
    let result: ReferenceResult = session()?.request(Op::ReferenceCall, &body, &[])?.read()?;
    Ok(result.words)
}

fn set(reference: u64, which: Call, arguments: &[u64]) -> CUresult {
    guard(|| call(reference, which, arguments).map(drop))
}

/// A call that returns one value.
fn get<T>(
    out: Out<T>,
    reference: u64,
    which: Call,
    arguments: &[u64],
    as_value: impl FnOnce(u64) -> T,
) -> CUresult {
    guard(|| {
        check(reference)?;
        out.required()?;
        let [word, ..] = call(reference, which, arguments)?;
        out.set(as_value(word))
    })
}

/// Releases the references of a context that ends, before its modules.
pub fn release_of_context(context: &Context) {
    for table in [&TEXTURES, &SURFACES] {
        for reference in table.handles() {
            let origin = table.get(reference).and_then(|entry| entry.lock().clone());
            let Some((module, ..)) = origin.filter(|(.., of)| *of == context.handle) else {
                continue;
            };
            if module == 0 {
                // An error means that the server is gone, and the reference with it.
                let _ = call(reference, Call::Destroy, &[]);
            }
            table.ends_with_context(reference);
            if let Some(entry) = table.retire(reference) {
                *entry.lock() = None;
                table.recycle(entry);
            }
        }
    }
}

/// `cuTexRefDestroy`.
pub unsafe extern "C" fn destroy(reference: u64) -> CUresult {
    guard(|| {
        call(reference, Call::Destroy, &[])?;
        if let Some(entry) = TEXTURES.retire(reference) {
            *entry.lock() = None;
            TEXTURES.recycle(entry);
        }
        Ok(())
    })
}

/// `cuTexRefSetArray`.
pub unsafe extern "C" fn set_array(reference: u64, array: u64, flags: u32) -> CUresult {
    guard(|| {
        check(reference)?;
        array::array(array)?;
        call(reference, Call::SetArray, &[array, flags.into()]).map(drop)
    })
}

/// `cuTexRefSetMipmappedArray`.
pub unsafe extern "C" fn set_mipmapped_array(reference: u64, array: u64, flags: u32) -> CUresult {
    guard(|| {
        check(reference)?;
        array::mipmap(array)?;
        call(reference, Call::SetMipmappedArray, &[array, flags.into()]).map(drop)
    })
}

/// `cuTexRefSetAddress`.
pub unsafe extern "C" fn set_address(
    offset: Out<usize>,
    reference: u64,
    address: CUdeviceptr,
    len: usize,
) -> CUresult {
    guard(|| {
        let has_place = u64::from(!offset.is_null());
        let arguments = [address, len as u64, has_place];
        let [at, ..] = call(reference, Call::SetAddress, &arguments)?;
        offset.set_if_wanted(at as usize);
        Ok(())
    })
}

/// `cuTexRefSetAddress2D`.
pub unsafe extern "C" fn set_address_2d(
    reference: u64,
    descriptor: In<CUDA_ARRAY_DESCRIPTOR>,
    address: CUdeviceptr,
    pitch: usize,
) -> CUresult {
    guard(|| {
        check(reference)?;
        let d = descriptor.get()?;
        let element = d.format as u64 | (d.channels as u64) << 32;
        let arguments = [address, pitch as u64, d.width, d.height, element];
        call(reference, Call::SetAddress2D, &arguments).map(drop)
    })
}

/// `cuTexRefSetFormat`.
pub unsafe extern "C" fn set_format(reference: u64, format: u32, channels: i32) -> CUresult {
    set(
        reference,
        Call::SetFormat,
        &[format.into(), channels as u64],
    )
}

/// `cuTexRefSetAddressMode`.
pub unsafe extern "C" fn set_address_mode(reference: u64, dimension: i32, mode: u32) -> CUresult {
    set(
        reference,
        Call::SetAddressMode,
        &[dimension as u64, mode.into()],
    )
}

/// `cuTexRefSetFilterMode`.
pub unsafe extern "C" fn set_filter_mode(reference: u64, mode: u32) -> CUresult {
    set(reference, Call::SetFilterMode, &[mode.into()])
}

/// `cuTexRefSetMipmapFilterMode`.
pub unsafe extern "C" fn set_mipmap_filter_mode(reference: u64, mode: u32) -> CUresult {
    set(reference, Call::SetMipmapFilterMode, &[mode.into()])
}

/// `cuTexRefSetMipmapLevelBias`.
pub unsafe extern "C" fn set_mipmap_level_bias(reference: u64, bias: f32) -> CUresult {
    set(
        reference,
        Call::SetMipmapLevelBias,
        &[bias.to_bits().into()],
    )
}

/// `cuTexRefSetMipmapLevelClamp`.
pub unsafe extern "C" fn set_mipmap_level_clamp(reference: u64, least: f32, most: f32) -> CUresult {
    let arguments = [least.to_bits().into(), most.to_bits().into()];
    set(reference, Call::SetMipmapLevelClamp, &arguments)
}

/// `cuTexRefSetMaxAnisotropy`.
pub unsafe extern "C" fn set_max_anisotropy(reference: u64, ratio: u32) -> CUresult {
    set(reference, Call::SetMaxAnisotropy, &[ratio.into()])
}

/// `cuTexRefSetBorderColor`.
pub unsafe extern "C" fn set_border_color(reference: u64, colour: In<f32>) -> CUresult {
    guard(|| {
        check(reference)?;
        let bits = |at| colour.at(at).map(|value| u64::from(value.to_bits()));
        let arguments = [bits(0)? | bits(1)? << 32, bits(2)? | bits(3)? << 32];
        call(reference, Call::SetBorderColor, &arguments).map(drop)
    })
}

/// `cuTexRefSetFlags`.
pub unsafe extern "C" fn set_flags(reference: u64, flags: u32) -> CUresult {
    set(reference, Call::SetFlags, &[flags.into()])
}

/// `cuTexRefGetAddress`.
pub unsafe extern "C" fn get_address(out: Out<CUdeviceptr>, reference: u64) -> CUresult {
    get(out, reference, Call::GetAddress, &[], |word| word)
}

/// `cuTexRefGetArray`.
pub unsafe extern "C" fn get_array(out: Out<u64>, reference: u64) -> CUresult {
    get(out, reference, Call::GetArray, &[], |word| word)
}

/// `cuTexRefGetMipmappedArray`.
pub unsafe extern "C" fn get_mipmapped_array(out: Out<u64>, reference: u64) -> CUresult {
    get(out, reference, Call::GetMipmappedArray, &[], |word| word)
}

/// `cuTexRefGetAddressMode`.
pub unsafe extern "C" fn get_address_mode(
    out: Out<u32>,
    reference: u64,
    dimension: i32,
) -> CUresult {
    let arguments = [dimension as u64];
    get(out, reference, Call::GetAddressMode, &arguments, |word| {
        word as u32
    })
}

/// `cuTexRefGetFilterMode`.
pub unsafe extern "C" fn get_filter_mode(out: Out<u32>, reference: u64) -> CUresult {
    get(out, reference, Call::GetFilterMode, &[], |word| word as u32)
}

/// `cuTexRefGetFormat`.
pub unsafe extern "C" fn get_format(
    format: Out<u32>,
    channels: Out<i32>,
    reference: u64,
) -> CUresult {
    guard(|| {
        let [first, second, ..] = call(reference, Call::GetFormat, &[])?;
        channels.set_if_wanted(second as i32);
        format.set_if_wanted(first as u32);
        Ok(())
    })
}

/// `cuTexRefGetMipmapFilterMode`.
pub unsafe extern "C" fn get_mipmap_filter_mode(out: Out<u32>, reference: u64) -> CUresult {
    get(out, reference, Call::GetMipmapFilterMode, &[], |word| {
        word as u32
    })
}

fn float(word: u64) -> f32 {
    f32::from_bits(word as u32)
}

/// `cuTexRefGetMipmapLevelBias`.
pub unsafe extern "C" fn get_mipmap_level_bias(out: Out<f32>, reference: u64) -> CUresult {
    get(out, reference, Call::GetMipmapLevelBias, &[], float)
}

/// `cuTexRefGetMipmapLevelClamp`.
pub unsafe extern "C" fn get_mipmap_level_clamp(
    least: Out<f32>,
    most: Out<f32>,
    reference: u64,
) -> CUresult {
    guard(|| {
        check(reference)?;
        least.required()?;
        most.required()?;
        let [first, second, ..] = call(reference, Call::GetMipmapLevelClamp, &[])?;
        least.set(float(first))?;
        most.set(float(second))
    })
}

/// `cuTexRefGetMaxAnisotropy`.
pub unsafe extern "C" fn get_max_anisotropy(out: Out<i32>, reference: u64) -> CUresult {
    get(out, reference, Call::GetMaxAnisotropy, &[], |word| {
        word as i32
    })
}

/// `cuTexRefGetBorderColor`.
pub unsafe extern "C" fn get_border_color(out: Out<f32>, reference: u64) -> CUresult {
    guard(|| {
        check(reference)?;
        out.required()?;
        let colour = call(reference, Call::GetBorderColor, &[])?.map(float);
        let mut values = colour.into_iter().enumerate();
        values.try_for_each(|(at, value)| out.set_at(at, value))
    })
}

/// `cuTexRefGetFlags`.
pub unsafe extern "C" fn get_flags(out: Out<u32>, reference: u64) -> CUresult {
    get(out, reference, Call::GetFlags, &[], |word| word as u32)
}

/// `cuSurfRefSetArray`.
pub unsafe extern "C" fn surface_set_array(reference: u64, array: u64, flags: u32) -> CUresult {
    guard(|| {
        check(reference)?;
        array::array(array)?;
        call(reference, Call::SurfaceSetArray, &[array, flags.into()]).map(drop)
    })
}

/// `cuSurfRefGetArray`.
pub unsafe extern "C" fn surface_get_array(out: Out<u64>, reference: u64) -> CUresult {
    get(out, reference, Call::SurfaceGetArray, &[], |word| word)
}

/// `cuParamSetTexRef`: a module's references are bound to its kernels as they are; the call has done nothing since
/// CUDA 4.
pub unsafe extern "C" fn param_set(function: u64, unit: i32, reference: u64) -> CUresult {
    guard(|| {
        context::current()?;
        module::function(function)?;
        if unit != -1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        TEXTURES
            .get(reference)
            .ok_or(CUDA_ERROR_INVALID_HANDLE)
            .map(drop)
    })
}
