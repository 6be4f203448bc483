//! Texture and surface references of old modules. Their state is the driver's own.

use super::reply::Reply;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::calls::module::{image_ready, separate};
use crate::engine::images::contents::Raw;
use crate::engine::objects::arrays::{RawArray, RawReference, Reference};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::array::{
    GetReference, ReferenceArguments, ReferenceCall, ReferenceResult,
};
use zerocopy::IntoBytes;

/// `cuModuleGetTexRef`, `cuModuleGetSurfRef`, `cuTexRefCreate`.
pub fn get_reference(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, GetReference>,
) -> Reply {
    let Call { body, message } = call;
    let name = message.name::<GetReference>()?;
    let name = name.as_ptr().cast();
    let driver = &shared.gpu.driver.array;
    let kind = Handle(body.reference).kind();
    let (mut texture, mut surface) = (CUtexref::NULL, CUsurfref::NULL);
    let device = if body.module == 0 {
        let device = shared.gpu.device(body.device)?;
        device.make_current(&shared.gpu.driver)?;
        driver.tex_ref_create(&mut texture)?;
        device.ordinal
    } else {
        // A binding stays in the module, so the module must not be shared with other clients.
        separate(session, shared, body.module)?;
        session.objects.image(body.module)?.note_altered();
        let (raw, device, _) = image_ready(session, shared, body.module, body.device)?;
        let Raw::Module(module) = raw else {
            return Err(CUDA_ERROR_INVALID_HANDLE.into());
        };
        if kind == Some(Kind::SurfaceReference) {
            driver.module_get_surf_ref(&mut surface, module, name)?;
        } else {
            driver.module_get_tex_ref(&mut texture, module, name)?;
        }
        device
    };
    let raw = if surface.is_null() {
        RawReference::Texture(texture)
    } else {
        RawReference::Surface(surface)
    };
    let table = match raw {
        RawReference::Texture(_) => &mut session.objects.texture_references,
        RawReference::Surface(_) => &mut session.objects.surface_references,
    };
    let reference = Reference {
        raw,
        device,
        image: body.module,
        array: 0,
    };
    if let Err((status, reference)) = table.insert(body.reference, reference) {
        reference.end(&shared.gpu);
        return Err(status.into());
    }
    Ok(Vec::new())
}

/// A call on a reference. Addresses are not checked: the driver accepts any address, and a kernel could read the
/// same memory without a reference.
pub fn reference_call(session: &mut Session, shared: &Shared, body: ReferenceArguments) -> Reply {
    let call = ReferenceCall::from_u32(body.call)
        .ok_or_else(|| CallError::Violation(format!("reference call {}", body.call)))?;
    let mut out = ReferenceResult::default();
    match Handle(body.reference).kind() {
        Some(Kind::SurfaceReference) => {
            surface_reference_call(session, shared, &body, call, &mut out)?;
        }
        _ => texture_reference_call(session, shared, &body, call, &mut out)?,
    }
    Ok(out.as_bytes().to_vec())
}

fn surface_reference_call(
    session: &mut Session,
    shared: &Shared,
    body: &ReferenceArguments,
    call: ReferenceCall,
    out: &mut ReferenceResult,
) -> Result<(), CallError> {
    let reference = session.objects.surface_references.get(body.reference)?;
    shared.gpu.devices[reference.device].make_current(&shared.gpu.driver)?;
    let RawReference::Surface(raw) = reference.raw else {
        return Err(CUDA_ERROR_INVALID_HANDLE.into());
    };
    let driver = &shared.gpu.driver.array;
    let words = &body.words;
    match call {
        ReferenceCall::SurfaceSetArray => {
            driver.surf_ref_set_array(raw, bind(session, words[0])?, words[1] as u32)?;
            session
                .objects
                .surface_references
                .get_mut(body.reference)?
                .array = words[0];
        }
        ReferenceCall::SurfaceGetArray => {
            driver.surf_ref_get_array(&mut CUarray::default(), raw)?;
            out.words[0] = reference.array;
        }
        _ => return Err(CUDA_ERROR_INVALID_HANDLE.into()),
    }
    Ok(())
}

/// The driver's array behind a handle. From now on it is kept until the end of the session, because a reference or
/// a graph that names it may be read at any launch of a kernel or of the graph.
pub fn bind(session: &mut Session, handle: u64) -> Result<CUarray, CUresult> {
    if handle == 0 {
        return Ok(CUarray::NULL);
    }
    let array = session.objects.arrays.get_mut(handle)?;
    array.bound = true;
    let (raw, parent) = (array.raw, array.parent);
    session.objects.graphs.refer_to(handle);
    if let Ok(parent) = session.objects.mipmaps.get_mut(parent) {
        parent.bound = true;
    } else if let Ok(parent) = session.objects.arrays.get_mut(parent) {
        parent.bound = true;
    }
    match raw {
        RawArray::Plain(array) => Ok(array),
        RawArray::Mipmapped(_) => Err(CUDA_ERROR_INVALID_HANDLE),
    }
}

fn bind_mipmap(session: &mut Session, handle: u64) -> Result<CUmipmappedArray, CUresult> {
    if handle == 0 {
        return Ok(CUmipmappedArray::NULL);
    }
    let array = session.objects.mipmaps.get_mut(handle)?;
    array.bound = true;
    match array.raw {
        RawArray::Mipmapped(array) => Ok(array),
        RawArray::Plain(_) => Err(CUDA_ERROR_INVALID_HANDLE),
    }
}

fn texture_reference_call(
    session: &mut Session,
    shared: &Shared,
    body: &ReferenceArguments,
    call: ReferenceCall,
    out: &mut ReferenceResult,
) -> Result<(), CallError> {
    let reference = session.objects.texture_references.get(body.reference)?;
    let bound = reference.array;
    shared.gpu.devices[reference.device].make_current(&shared.gpu.driver)?;
    let RawReference::Texture(raw) = reference.raw else {
        return Err(CUDA_ERROR_INVALID_HANDLE.into());
    };
    let driver = &shared.gpu.driver.array;
    let [a, b, c, d, e, _] = body.words;
    let float = |word: u64| f32::from_bits(word as u32);
    let pair = |word: u64| [float(word), float(word >> 32)];
    let [first, second, third, fourth] = &mut out.words;
    let mut number = 0u32;
    match call {
        ReferenceCall::Destroy => {
            // A module's reference is destroyed with the module.
            session
                .objects
                .texture_references
                .remove(body.reference)?
                .end(&shared.gpu);
        }
        ReferenceCall::SetArray => {
            driver.tex_ref_set_array(raw, bind(session, a)?, b as u32)?;
            session
                .objects
                .texture_references
                .get_mut(body.reference)?
                .array = a;
        }
        ReferenceCall::SetMipmappedArray => {
            driver.tex_ref_set_mipmapped_array(raw, bind_mipmap(session, a)?, b as u32)?;
            session
                .objects
                .texture_references
                .get_mut(body.reference)?
                .array = a;
        }
        ReferenceCall::SetAddress => {
            let mut offset = 0usize;
            let place = if c == 0 {
                std::ptr::null_mut()
            } else {
                &raw mut offset
            };
            driver.tex_ref_set_address(place, raw, a, b as usize)?;
            *first = offset as u64;
        }
        ReferenceCall::SetAddress2D => {
            let descriptor = CUDA_ARRAY_DESCRIPTOR {
                width: c,
                height: d,
                format: e as u32,
                channels: (e >> 32) as u32,
            };
            driver.tex_ref_set_address_2d(raw, &descriptor, a, b as usize)?;
        }
        ReferenceCall::SetFormat => driver.tex_ref_set_format(raw, a as u32, b as i32)?,
        ReferenceCall::SetAddressMode => {
            driver.tex_ref_set_address_mode(raw, a as i32, b as u32)?
        }
        ReferenceCall::SetFilterMode => driver.tex_ref_set_filter_mode(raw, a as u32)?,
        ReferenceCall::SetMipmapFilterMode => {
            driver.tex_ref_set_mipmap_filter_mode(raw, a as u32)?
        }
        ReferenceCall::SetMipmapLevelBias => driver.tex_ref_set_mipmap_level_bias(raw, float(a))?,
        ReferenceCall::SetMipmapLevelClamp => {
            driver.tex_ref_set_mipmap_level_clamp(raw, float(a), float(b))?;
        }
        ReferenceCall::SetMaxAnisotropy => driver.tex_ref_set_max_anisotropy(raw, a as u32)?,
        ReferenceCall::SetBorderColor => {
            let ([red, green], [blue, alpha]) = (pair(a), pair(b));
            let mut colour = [red, green, blue, alpha];
            driver.tex_ref_set_border_color(raw, colour.as_mut_ptr())?;
        }
        ReferenceCall::SetFlags => driver.tex_ref_set_flags(raw, a as u32)?,
        ReferenceCall::GetAddress => driver.tex_ref_get_address(first, raw)?,
        ReferenceCall::GetArray => {
            driver.tex_ref_get_array(&mut CUarray::default(), raw)?;
            *first = bound;
        }
        ReferenceCall::GetMipmappedArray => {
            driver.tex_ref_get_mipmapped_array(&mut CUmipmappedArray::default(), raw)?;
            *first = bound;
        }
        ReferenceCall::GetAddressMode => {
            driver.tex_ref_get_address_mode(&mut number, raw, a as i32)?;
            *first = number.into();
        }
        ReferenceCall::GetFilterMode => {
            driver.tex_ref_get_filter_mode(&mut number, raw)?;
            *first = number.into();
        }
        ReferenceCall::GetFormat => {
            let mut channels = 0;
            driver.tex_ref_get_format(&mut number, &mut channels, raw)?;
            (*first, *second) = (number.into(), channels as u64);
        }
        ReferenceCall::GetMipmapFilterMode => {
            driver.tex_ref_get_mipmap_filter_mode(&mut number, raw)?;
            *first = number.into();
        }
        ReferenceCall::GetMipmapLevelBias => {
            let mut bias = 0.0;
            driver.tex_ref_get_mipmap_level_bias(&mut bias, raw)?;
            *first = bias.to_bits().into();
        }
        ReferenceCall::GetMipmapLevelClamp => {
            let (mut least, mut most) = (0.0, 0.0);
            driver.tex_ref_get_mipmap_level_clamp(&mut least, &mut most, raw)?;
            (*first, *second) = (least.to_bits().into(), most.to_bits().into());
        }
        ReferenceCall::GetMaxAnisotropy => {
            let mut ratio = 0;
            driver.tex_ref_get_max_anisotropy(&mut ratio, raw)?;
            *first = ratio as u64;
        }
        ReferenceCall::GetBorderColor => {
            let mut colour = [0f32; 4];
            driver.tex_ref_get_border_color(colour.as_mut_ptr(), raw)?;
            for (word, value) in [first, second, third, fourth].into_iter().zip(colour) {
                *word = value.to_bits().into();
            }
        }
        ReferenceCall::GetFlags => {
            driver.tex_ref_get_flags(&mut number, raw)?;
            *first = number.into();
        }
        ReferenceCall::SurfaceSetArray | ReferenceCall::SurfaceGetArray => {
            return Err(CUDA_ERROR_INVALID_HANDLE.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, obeys, obeys_with_handle, others,
    };
    use mpsshim_proto::message::array::ArrayCreate;
    use mpsshim_proto::message::{Object, Op};

    const NAME: &[u8] = b"texture\0";

    fn get(test: &mut Fixture, module: u64, kind: Kind) -> GetReference {
        GetReference {
            module,
            reference: test.new_handle(kind),
            ..GetReference::default()
        }
    }

    fn reference(test: &mut Fixture, kind: Kind) -> u64 {
        let module = test.image(Kind::Module);
        let body = get(test, module, kind);
        assert_eq!(test.status(Op::GetReference, &body, NAME), CUDA_SUCCESS);
        body.reference
    }

    fn array(test: &mut Fixture, kind: Kind) -> u64 {
        let body = ArrayCreate {
            array: test.new_handle(kind),
            size: [16, 0, 0],
            format: CU_AD_FORMAT_FLOAT,
            channels: 1,
            levels: 1,
            ..ArrayCreate::default()
        };
        assert_eq!(test.status(Op::ArrayCreate, &body, &[]), CUDA_SUCCESS);
        body.array
    }

    fn call(reference: u64, call: ReferenceCall, first: u64) -> ReferenceArguments {
        ReferenceArguments {
            reference,
            words: [first, 0, 0, 0, 0, 0],
            call: call as u32,
            pad: 0,
        }
    }

    fn references(test: &Fixture) -> usize {
        let objects = &test.session.objects;
        objects.texture_references.len() + objects.surface_references.len()
    }

    #[test]
    fn a_reference_is_of_a_module_of_the_session() {
        let mut test = Fixture::new(&[
            ("cuModuleGetTexRef", counts as Function),
            ("cuModuleGetSurfRef", counts as Function),
            ("cuTexRefCreate", counts as Function),
        ]);
        let (module, library) = (test.image(Kind::Module), test.image(Kind::Library));
        for kind in [Kind::TextureReference, Kind::SurfaceReference] {
            let [_, stale, context] = others(module);
            for module in [stale, context, library] {
                let body = get(&mut test, module, kind);
                let status = test.status(Op::GetReference, &body, NAME);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{module:#x}");
            }
            let body = get(&mut test, module, kind);
            assert!(test.is_violation(Op::GetReference, &body, b"texture"));
        }
        let elsewhere = GetReference {
            device: 1,
            ..get(&mut test, 0, Kind::TextureReference)
        };
        let status = test.status(Op::GetReference, &elsewhere, NAME);
        assert_eq!(status, CUDA_ERROR_INVALID_DEVICE);
        assert_eq!((test.calls(), references(&test)), (0, 0));
    }

    #[test]
    fn a_reference_that_the_driver_does_not_find_can_be_found_later() {
        for (of_module, kind, name) in [
            (true, Kind::TextureReference, "cuModuleGetTexRef"),
            (true, Kind::SurfaceReference, "cuModuleGetSurfRef"),
            (false, Kind::TextureReference, "cuTexRefCreate"),
        ] {
            let mut test = Fixture::new(&[
                (name, obeys_with_handle as Function),
                ("cuTexRefDestroy", counts as Function),
            ]);
            let module = match of_module {
                true => test.image(Kind::Module),
                false => 0,
            };
            let body = get(&mut test, module, kind);
            for (ordered, status, count) in [
                (CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_FOUND, 0),
                (CUDA_SUCCESS, CUDA_SUCCESS, 1),
                (CUDA_SUCCESS, CUDA_ERROR_INVALID_HANDLE, 1),
                (FAULT, FAULT, 1),
            ] {
                test.orders(ordered);
                assert_eq!(test.told(Op::GetReference, &body, NAME), status, "{name}");
                assert_eq!(references(&test), count, "{name}");
            }
            // One of a module is the module's.
            assert_eq!(test.calls(), u32::from(!of_module), "{name}");
            assert!(test.has_ended(), "{name}");
        }
    }

    #[test]
    fn a_call_is_of_a_reference_of_its_kind() {
        let mut test = Fixture::new(&[
            ("cuTexRefGetFlags", counts as Function),
            ("cuSurfRefGetArray", counts as Function),
        ]);
        let texture = reference(&mut test, Kind::TextureReference);
        let surface = reference(&mut test, Kind::SurfaceReference);
        let mut wrong = vec![
            call(texture, ReferenceCall::SurfaceGetArray, 0),
            call(texture, ReferenceCall::SurfaceSetArray, 0),
            call(surface, ReferenceCall::GetFlags, 0),
            call(surface, ReferenceCall::Destroy, 0),
        ];
        wrong.extend(others(texture).map(|one| call(one, ReferenceCall::GetFlags, 0)));
        wrong.extend(others(surface).map(|one| call(one, ReferenceCall::SurfaceGetArray, 0)));
        for body in wrong {
            let status = test.status(Op::ReferenceCall, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{:#x}", body.reference);
        }
        for number in [28, u32::MAX] {
            let body = ReferenceArguments {
                call: number,
                ..call(texture, ReferenceCall::GetFlags, 0)
            };
            assert!(test.is_violation(Op::ReferenceCall, &body, &[]), "{number}");
        }
        assert_eq!((test.calls(), references(&test)), (0, 2));
    }

    #[test]
    fn each_call_on_a_reference_returns_the_error_of_the_driver() {
        use ReferenceCall::*;
        let (texture, surface) = (Kind::TextureReference, Kind::SurfaceReference);
        for (kind, what, name) in [
            (texture, SetArray, "cuTexRefSetArray"),
            (texture, SetMipmappedArray, "cuTexRefSetMipmappedArray"),
            (texture, SetAddress, "cuTexRefSetAddress_v2"),
            (texture, SetAddress2D, "cuTexRefSetAddress2D_v3"),
            (texture, SetFormat, "cuTexRefSetFormat"),
            (texture, SetAddressMode, "cuTexRefSetAddressMode"),
            (texture, SetFilterMode, "cuTexRefSetFilterMode"),
            (texture, SetMipmapFilterMode, "cuTexRefSetMipmapFilterMode"),
            (texture, SetMipmapLevelBias, "cuTexRefSetMipmapLevelBias"),
            (texture, SetMipmapLevelClamp, "cuTexRefSetMipmapLevelClamp"),
            (texture, SetMaxAnisotropy, "cuTexRefSetMaxAnisotropy"),
            (texture, SetBorderColor, "cuTexRefSetBorderColor"),
            (texture, SetFlags, "cuTexRefSetFlags"),
            (texture, GetAddress, "cuTexRefGetAddress_v2"),
            (texture, GetArray, "cuTexRefGetArray"),
            (texture, GetMipmappedArray, "cuTexRefGetMipmappedArray"),
            (texture, GetAddressMode, "cuTexRefGetAddressMode"),
            (texture, GetFilterMode, "cuTexRefGetFilterMode"),
            (texture, GetFormat, "cuTexRefGetFormat"),
            (texture, GetMipmapFilterMode, "cuTexRefGetMipmapFilterMode"),
            (texture, GetMipmapLevelBias, "cuTexRefGetMipmapLevelBias"),
            (texture, GetMipmapLevelClamp, "cuTexRefGetMipmapLevelClamp"),
            (texture, GetMaxAnisotropy, "cuTexRefGetMaxAnisotropy"),
            (texture, GetBorderColor, "cuTexRefGetBorderColor"),
            (texture, GetFlags, "cuTexRefGetFlags"),
            (surface, SurfaceSetArray, "cuSurfRefSetArray"),
            (surface, SurfaceGetArray, "cuSurfRefGetArray"),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let body = call(reference(&mut test, kind), what, 0);
            for status in [CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS, FAULT] {
                test.orders(status);
                assert_eq!(test.told(Op::ReferenceCall, &body, &[]), status, "{name}");
            }
            assert!(test.has_ended(), "{name}");
        }
    }

    #[test]
    fn a_reference_names_arrays_of_the_session_and_the_last_that_the_driver_took() {
        use ReferenceCall::*;
        for (of, set, get, array_kind, name) in [
            (
                Kind::TextureReference,
                SetArray,
                GetArray,
                Kind::Array,
                "cuTexRefSetArray",
            ),
            (
                Kind::TextureReference,
                SetMipmappedArray,
                GetMipmappedArray,
                Kind::MipmappedArray,
                "cuTexRefSetMipmappedArray",
            ),
            (
                Kind::SurfaceReference,
                SurfaceSetArray,
                SurfaceGetArray,
                Kind::Array,
                "cuSurfRefSetArray",
            ),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let reference = reference(&mut test, of);
            let array = array(&mut test, array_kind);
            let [_, stale, context] = others(array);
            for wrong in [stale, context] {
                let body = call(reference, set, wrong);
                let status = test.status(Op::ReferenceCall, &body, &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{wrong:#x}");
            }
            for (status, named) in [(CUDA_ERROR_NOT_SUPPORTED, 0), (CUDA_SUCCESS, array)] {
                test.orders(status);
                let body = call(reference, set, array);
                assert_eq!(test.status(Op::ReferenceCall, &body, &[]), status);
                let body = call(reference, get, 0);
                let told = test.reply::<u64>(Op::ReferenceCall, &body, &[]);
                assert_eq!(told, Ok(named), "{name}");
            }
            // A kernel may look at it.
            let body = Object { object: array };
            assert_eq!(test.status(Op::ArrayDestroy, &body, &[]), CUDA_SUCCESS);
            assert_eq!(test.session.objects.bound_arrays.len(), 1, "{name}");
        }
    }

    #[test]
    fn a_reference_of_a_module_is_not_destroyed_and_named_no_more() {
        let mut test = Fixture::new(&[("cuTexRefDestroy", counts as Function)]);
        let of_module = reference(&mut test, Kind::TextureReference);
        let own = get(&mut test, 0, Kind::TextureReference);
        assert_eq!(test.status(Op::GetReference, &own, NAME), CUDA_SUCCESS);
        for (reference, destroyed) in [(of_module, 0), (own.reference, 1)] {
            let body = call(reference, ReferenceCall::Destroy, 0);
            assert_eq!(test.status(Op::ReferenceCall, &body, &[]), CUDA_SUCCESS);
            assert_eq!(test.calls(), destroyed);
            let again = test.status(Op::ReferenceCall, &body, &[]);
            assert_eq!(again, CUDA_ERROR_INVALID_HANDLE);
        }
    }
}
