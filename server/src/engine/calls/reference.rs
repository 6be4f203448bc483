//! Texture and surface references of old modules. Their state is the driver's own.

use super::Reply;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
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

impl Session {
    /// `cuModuleGetTexRef`, `cuModuleGetSurfRef`, `cuTexRefCreate`.
    pub fn get_reference(&mut self, shared: &Shared, call: Call<'_, GetReference>) -> Reply {
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
            self.separate(shared, body.module)?;
            self.image(body.module)?.note_altered();
            let (raw, device, _) = self.image_ready(shared, body.module, body.device)?;
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
            RawReference::Texture(_) => &mut self.objects.texture_references,
            RawReference::Surface(_) => &mut self.objects.surface_references,
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
    pub fn reference_call(&mut self, shared: &Shared, body: ReferenceArguments) -> Reply {
        let call = ReferenceCall::from_u32(body.call)
            .ok_or_else(|| CallError::Violation(format!("reference call {}", body.call)))?;
        let mut out = ReferenceResult::default();
        match Handle(body.reference).kind() {
            Some(Kind::SurfaceReference) => {
                self.surface_reference_call(shared, &body, call, &mut out)?;
            }
            _ => self.texture_reference_call(shared, &body, call, &mut out)?,
        }
        Ok(out.as_bytes().to_vec())
    }

    fn surface_reference_call(
        &mut self,
        shared: &Shared,
        body: &ReferenceArguments,
        call: ReferenceCall,
        out: &mut ReferenceResult,
    ) -> Result<(), CallError> {
        let reference = self.objects.surface_references.get(body.reference)?;
        shared.gpu.devices[reference.device].make_current(&shared.gpu.driver)?;
        let RawReference::Surface(raw) = reference.raw else {
            return Err(CUDA_ERROR_INVALID_HANDLE.into());
        };
        let driver = &shared.gpu.driver.array;
        let words = &body.words;
        match call {
            ReferenceCall::SurfaceSetArray => {
                driver.surf_ref_set_array(raw, self.bind(words[0])?, words[1] as u32)?;
                self.objects
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
    pub fn bind(&mut self, handle: u64) -> Result<CUarray, CUresult> {
        if handle == 0 {
            return Ok(CUarray::NULL);
        }
        let array = self.objects.arrays.get_mut(handle)?;
        array.bound = true;
        let (raw, parent) = (array.raw, array.parent);
        if let Ok(parent) = self.objects.mipmaps.get_mut(parent) {
            parent.bound = true;
        } else if let Ok(parent) = self.objects.arrays.get_mut(parent) {
            parent.bound = true;
        }
        match raw {
            RawArray::Plain(array) => Ok(array),
            RawArray::Mipmapped(_) => Err(CUDA_ERROR_INVALID_HANDLE),
        }
    }

    fn bind_mipmap(&mut self, handle: u64) -> Result<CUmipmappedArray, CUresult> {
        if handle == 0 {
            return Ok(CUmipmappedArray::NULL);
        }
        let array = self.objects.mipmaps.get_mut(handle)?;
        array.bound = true;
        match array.raw {
            RawArray::Mipmapped(array) => Ok(array),
            RawArray::Plain(_) => Err(CUDA_ERROR_INVALID_HANDLE),
        }
    }

    fn texture_reference_call(
        &mut self,
        shared: &Shared,
        body: &ReferenceArguments,
        call: ReferenceCall,
        out: &mut ReferenceResult,
    ) -> Result<(), CallError> {
        let reference = self.objects.texture_references.get(body.reference)?;
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
                self.objects
                    .texture_references
                    .remove(body.reference)?
                    .end(&shared.gpu);
            }
            ReferenceCall::SetArray => {
                driver.tex_ref_set_array(raw, self.bind(a)?, b as u32)?;
                self.objects
                    .texture_references
                    .get_mut(body.reference)?
                    .array = a;
            }
            ReferenceCall::SetMipmappedArray => {
                driver.tex_ref_set_mipmapped_array(raw, self.bind_mipmap(a)?, b as u32)?;
                self.objects
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
            ReferenceCall::SetMipmapLevelBias => {
                driver.tex_ref_set_mipmap_level_bias(raw, float(a))?
            }
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
}
