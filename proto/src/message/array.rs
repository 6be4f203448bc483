//! Arrays, textures, surfaces, two- and three-dimensional copies.
