//! Texture and surface objects. Kernels use the driver's own handle, so the program gets that handle.

use mpsshim_api::cuda::{CUDA_RESOURCE_DESC, CUDA_RESOURCE_VIEW_DESC, CUDA_TEXTURE_DESC, CUresult};

use super::entries;
use crate::ffi::{In, Out, guard};
use crate::proxy::submit::session;
use crate::proxy::{array, context};

entries! {
    cuTexObjectCreate(_, _, _, _) => create,
    cuTexObjectDestroy(_) => destroy,
    cuTexObjectGetResourceDesc(_, _) => get_resource,
    cuTexObjectGetTextureDesc(_, _) => get_texture,
    cuTexObjectGetResourceViewDesc(_, _) => get_view,
    cuSurfObjectCreate(_, _) => create_surface,
    cuSurfObjectDestroy(_) => destroy_surface,
    cuSurfObjectGetResourceDesc(_, _) => get_surface_resource,
}

/// `cuTexObjectCreate`.
pub unsafe extern "C" fn create(
    out: Out<u64>,
    resource: In<CUDA_RESOURCE_DESC>,
    texture: In<CUDA_TEXTURE_DESC>,
    view: In<CUDA_RESOURCE_VIEW_DESC>,
) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let (resource, texture) = (resource.get()?, texture.get()?);
        let view = (!view.is_null()).then(|| view.get()).transpose()?;
        let context = context::current()?;
        out.set(array::create_object(
            session()?,
            context,
            resource,
            Some(texture),
            view,
        )?)
    })
}

/// `cuTexObjectDestroy`.
pub unsafe extern "C" fn destroy(object: u64) -> CUresult {
    guard(|| {
        context::current()?;
        array::destroy_object(session()?, false, object)
    })
}

/// `cuTexObjectGetResourceDesc`.
pub unsafe extern "C" fn get_resource(out: Out<CUDA_RESOURCE_DESC>, object: u64) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        out.set(array::object(false, object)?.resource)
    })
}

/// `cuTexObjectGetTextureDesc`.
pub unsafe extern "C" fn get_texture(out: Out<CUDA_TEXTURE_DESC>, object: u64) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        out.set(array::object(false, object)?.texture)
    })
}

/// `cuTexObjectGetResourceViewDesc`.
pub unsafe extern "C" fn get_view(out: Out<CUDA_RESOURCE_VIEW_DESC>, object: u64) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        out.set(array::object(false, object)?.view)
    })
}

/// `cuSurfObjectCreate`.
pub unsafe extern "C" fn create_surface(
    out: Out<u64>,
    resource: In<CUDA_RESOURCE_DESC>,
) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let (resource, context) = (resource.get()?, context::current()?);
        out.set(array::create_object(
            session()?,
            context,
            resource,
            None,
            None,
        )?)
    })
}

/// `cuSurfObjectDestroy`.
pub unsafe extern "C" fn destroy_surface(object: u64) -> CUresult {
    guard(|| {
        context::current()?;
        array::destroy_object(session()?, true, object)
    })
}

/// `cuSurfObjectGetResourceDesc`.
pub unsafe extern "C" fn get_surface_resource(
    out: Out<CUDA_RESOURCE_DESC>,
    object: u64,
) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        out.set(array::object(true, object)?.resource)
    })
}
