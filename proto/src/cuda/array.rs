//! Arrays, textures, surfaces, two- and three-dimensional copies. Values and layouts of `cuda.h`, CUDA 13.0.

handles! {
    CUmipmappedArray; CUtexObject; CUsurfObject; CUtexref; CUsurfref;
}
