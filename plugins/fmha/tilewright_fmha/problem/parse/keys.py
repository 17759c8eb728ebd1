"""Keys and values of a request: items of one size, sequences end to end, or pages and the tables that name them."""

from __future__ import annotations

from tilewright_fmha.problem.attributes import Attributes, check_page_size
from tilewright_fmha.problem.declared.attributes import MOST
from tilewright_fmha.problem.declared.operands import form_of
from tilewright_fmha.problem.operands import Tensors, check_index
from tilewright_fmha.problem.problem import Paging
from tilewright_fmha.problem.shapes import Sizes, check_hdims, check_pair, rank
from tilewright_fmha.vocabulary import ATTENTION, KvLayout, KvLookup, vector_width
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["cache_items_of", "read_keys", "read_paging", "read_values"]

_PAGE_ATTRIBUTES = (("page_size", "page_size"), ("kv_layout", "kv_layout"), ("kv_lookup", "kv_lookup"))
_SHAPES = {
    (KvLayout.LINEAR, 0): "[pages, page size, heads, elements]",
    (KvLayout.VECTORIZED, 0): "[pages, heads, elements/x, page size, x]",
    (KvLayout.LINEAR, 1): "[pages, page size, heads, elements]",
    (KvLayout.VECTORIZED, 1): "[pages, heads, page size/x, elements, x]",
}


def read_values(tensors: Tensors, attributes: Attributes) -> None:
    """Where there is no ``v``: values are the first elements of keys (multi-head latent attention)."""
    size, k = attributes.head_dim_v, tensors.inputs["k"]
    if "v" in tensors.inputs:
        if size:
            raise refuse(
                "head_dim_v says that values are part of the keys, but v is given",
                "attributes.head_dim_v",
                size,
                "latent_values",
                "leave v out, or head_dim_v",
            )
        return
    if not size:
        fix = f"give {form_of(ATTENTION, 'v')}, or head_dim_v where values are the first elements of keys"
        raise refuse("the input v is missing", "v", "", "operand_missing", fix)
    if attributes.kv_layout is KvLayout.VECTORIZED:
        raise refuse(
            "keys and values of vectorized pages lie in different orders",
            "attributes.kv_layout",
            KvLayout.VECTORIZED.value,
            "latent_values",
            "give pages in the linear layout, or v",
        )
    most = k.shape[-1] if k.shape else 0
    if size > most:
        raise refuse(
            f"keys of {most} elements hold no values of {size}",
            "attributes.head_dim_v",
            size,
            "latent_values",
            f"give head_dim_v of 1 to {most}",
        )
    tensors.inputs["v"] = TensorDesc(k.dtype, (*k.shape[:-1], size), k.strides)
    tensors.v_in_k = True


def read_keys(tensors: Tensors, attributes: Attributes, sizes: Sizes) -> Paging | None:
    """Sizes and places of ``k`` and ``v``; how they are paged, if so."""
    if "block_table" in tensors.inputs:
        return read_paging(tensors, attributes, sizes, "k", "v", "q")
    _no_pages(tensors, attributes)
    k, v = tensors.inputs["k"], tensors.inputs["v"]
    if sizes.varlen:
        _sequences(tensors, attributes, sizes, k, v)
    else:
        _items(tensors, attributes, sizes, k, v)
    check_hdims(sizes, ("q", tensors.inputs["q"]), ("k", k), ("v", v), k.shape[-1], v.shape[-1])
    for name in ("k", "v"):
        tensors.place(name, sizes.varlen)
    return None


def _sequences(tensors: Tensors, attributes: Attributes, sizes: Sizes, k: TensorDesc, v: TensorDesc) -> None:
    if "cu_seqlens_k" not in tensors.inputs:
        raise refuse(
            "cu_seqlens_q is given, but nothing says where the sequences of keys begin",
            "cu_seqlens_k",
            "",
            "varlen_operands",
            "give cu_seqlens_k, or block_table and seqlens_k for keys in pages",
        )
    if "cache_index" in tensors.inputs:
        raise refuse(
            "cache_index chooses among items of one size, but these are sequences end to end",
            "cache_index",
            tensors.inputs["cache_index"].shape,
            "varlen_operands",
            "leave cache_index out",
        )
    for name, desc in (("k", k), ("v", v)):
        rank(name, desc, 3, "[rows of all sequences, heads, elements], as q is")
    count = sizes.batch + 1
    check_index(tensors, "cu_seqlens_k", (count,), "batch_agrees", f"give {count} numbers, as many as cu_seqlens_q has")
    if attributes.max_k is None:
        raise refuse(
            "max_seqlen_k is needed: lengths are data, which no plan looks at",
            "attributes.max_seqlen_k",
            "",
            "max_seqlen_given",
            "give the most keys that any sequence has",
        )
    check_pair(sizes, ("k", k), ("v", v), 1)
    sizes.total_k, sizes.seq_k = k.shape[0], min(attributes.max_k, k.shape[0])


def _items(tensors: Tensors, attributes: Attributes, sizes: Sizes, k: TensorDesc, v: TensorDesc) -> None:
    for name in ("cu_seqlens_k", "max_seqlen_k"):
        if name in tensors.inputs or (name == "max_seqlen_k" and attributes.max_k is not None):
            raise refuse(
                f"{name} is for sequences end to end, but q has items of one size",
                f"attributes.{name}" if name == "max_seqlen_k" else name,
                attributes.max_k if name == "max_seqlen_k" else tensors.inputs[name].shape,
                "varlen_operands",
                f"leave {name} out (seqlens_k may say how many keys of each item count), or give cu_seqlens_q too",
            )
    for name, desc in (("k", k), ("v", v)):
        rank(name, desc, 4, "[batch, heads, rows, elements], as q is")
    check_pair(sizes, ("k", k), ("v", v), 1)
    sizes.seq_k, sizes.total_k = k.shape[2], k.shape[0] * k.shape[2]
    if sizes.seq_k > MOST or k.shape[0] > MOST:
        raise refuse("k is longer than an int32 counts", "k.shape", k.shape, "size_overflow", "split the problem")
    cache_items_of(tensors, sizes, "k", k)


def cache_items_of(tensors: Tensors, sizes: Sizes, name: str, desc: TensorDesc) -> int:
    """How many items a cache has: those of the batch, unless ``cache_index`` chooses among others."""
    if "cache_index" in tensors.inputs:
        check_index(
            tensors,
            "cache_index",
            (sizes.batch,),
            "batch_agrees",
            f"give {sizes.batch} numbers, one for each item of q",
        )
        if desc.shape[0] == 0 and sizes.batch:
            raise refuse(f"{name} has no items", f"{name}.shape", desc.shape, "batch_agrees", "give at least one item")
    elif desc.shape[0] != sizes.batch:
        raise refuse(
            f"{name} has {desc.shape[0]} items, but there are {sizes.batch} of queries",
            f"{name}.shape",
            desc.shape,
            "batch_agrees",
            f"give {sizes.batch} items, or cache_index to say which item of {name} belongs to which",
        )
    return desc.shape[0]


def _no_pages(tensors: Tensors, attributes: Attributes) -> None:
    if "page_starts" in tensors.inputs:
        raise refuse(
            "page_starts divides a block_table, but there is none",
            "page_starts",
            tensors.inputs["page_starts"].shape,
            "lookup_operands",
            "give block_table, or leave page_starts out",
        )
    for name, own in _PAGE_ATTRIBUTES:
        value = getattr(attributes, own)
        if value is not None:
            raise refuse(
                f"{name} is given, but keys and values are not in pages",
                f"attributes.{name}",
                str(value),
                "lookup_operands",
                f"give block_table, or leave {name} out",
            )


# ---- pages ----


def read_paging(
    tensors: Tensors, attributes: Attributes, sizes: Sizes, k_name: str, v_name: str, q_name: str
) -> Paging:
    """A cache of pages and its table; sets the room of a sequence, heads and head dimensions."""
    k, v = tensors.inputs[k_name], tensors.inputs[v_name]
    layout = attributes.kv_layout or KvLayout.LINEAR
    wanted = 4 if layout is KvLayout.LINEAR else 5
    for position, (name, desc) in enumerate(((k_name, k), (v_name, v))):
        if len(desc.shape) != wanted:
            other = KvLayout.VECTORIZED if layout is KvLayout.LINEAR else KvLayout.LINEAR
            raise refuse(
                f"{name} has {len(desc.shape)} dimensions, but pages in the {layout} layout have {wanted}",
                f"{name}.shape",
                desc.shape,
                "paged_shape",
                f"give {_SHAPES[layout, position]}, or set kv_layout={other}",
            )
    if layout is KvLayout.LINEAR:
        page, hdim_k, hdim_v = k.shape[1], k.shape[3], v.shape[3]
        check_pair(sizes, (k_name, k), (v_name, v), 2)
        axes = ("brhc", "brhc")
    else:
        page, hdim_k, hdim_v = _vectorized(sizes, k_name, k, v_name, v)
        axes = ("bhkrx", "bhkcx")
    check_page_size(page, f"{k_name}.shape")
    if attributes.page_size not in (None, page):
        raise refuse(
            f"page_size says {attributes.page_size}, but pages of {k_name} have {page} tokens",
            "attributes.page_size",
            attributes.page_size,
            "paged_shape",
            "leave page_size out, or let both agree",
        )
    if k.shape[0] > MOST:
        raise refuse("more pages than an int32 counts", f"{k_name}.shape", k.shape, "size_overflow", "use larger pages")
    q = (q_name, tensors.inputs[q_name])
    check_hdims(sizes, q, (k_name, k), (v_name, v), hdim_k, hdim_v)
    paging, room = _table(tensors, attributes, sizes, layout, page, k.shape[0])
    sizes.seq_k = min(room, attributes.max_k or room, MOST)
    sizes.total_k = k.shape[0] * page
    for name, own in zip((k_name, v_name), axes, strict=True):
        tensors.place(name, False, own)
    if layout is KvLayout.VECTORIZED:
        _chunks(tensors, k_name, v_name)
    return paging


def _vectorized(sizes: Sizes, k_name: str, k: TensorDesc, v_name: str, v: TensorDesc) -> tuple[int, int, int]:
    width = vector_width(k.dtype)
    page, hdim_k, hdim_v = k.shape[3], k.shape[2] * width, v.shape[3]
    if page % width:
        raise refuse(
            f"pages of {page} tokens do not fall into chunks of {width}",
            f"{k_name}.shape",
            k.shape,
            "vectorized_page",
            f"use pages of a multiple of {width} tokens, or kv_layout=linear",
        )
    wanted = (k.shape[0], k.shape[1], page // width, hdim_v, width)
    if k.shape[4] != width or v.shape != wanted:
        raise refuse(
            f"{k_name} {list(k.shape)} and {v_name} {list(v.shape)} are not pages in the vectorized layout",
            f"{v_name}.shape" if k.shape[4] == width else f"{k_name}.shape",
            v.shape if k.shape[4] == width else k.shape,
            "paged_shape",
            f"give keys [pages, heads, elements/{width}, page size, {width}] and values [pages, heads, "
            f"page size/{width}, elements, {width}]: chunks of sixteen bytes",
        )
    sizes.heads_k = k.shape[1]
    return page, hdim_k, hdim_v


def _chunks(tensors: Tensors, *names: str) -> None:
    for name in names:
        desc = tensors.inputs[name]
        if desc.strides[4] != 1 and desc.size:
            raise refuse(
                f"the chunks of {name} have gaps",
                f"{name}.strides",
                desc.strides,
                "paged_shape",
                "give chunks whose elements are neighbours",
            )


def _table(
    tensors: Tensors, attributes: Attributes, sizes: Sizes, layout: KvLayout, page: int, pages: int
) -> tuple[Paging, int]:
    """The paging, and the most tokens that the table has room for in one sequence."""
    for name in ("cu_seqlens_k", "cache_index"):
        if name in tensors.inputs:
            raise refuse(
                f"{name} has no meaning for keys in pages",
                name,
                tensors.inputs[name].shape,
                "lookup_operands",
                f"leave {name} out: block_table says where keys are, and seqlens_k how many",
            )
    if "seqlens_k" not in tensors.inputs:
        raise refuse(
            "keys in pages have no length of their own",
            "seqlens_k",
            "",
            "paged_needs_lengths",
            "give seqlens_k: the tokens of each sequence, int32 [B]",
        )
    table = tensors.inputs["block_table"]
    lookup = attributes.kv_lookup or (KvLookup.SGLANG if "page_starts" in tensors.inputs else KvLookup.VLLM)
    if lookup is KvLookup.VLLM:
        return _vllm(tensors, sizes, layout, page, pages, table)
    if "page_starts" not in tensors.inputs:
        raise refuse(
            "with kv_lookup=sglang something must say where each sequence's pages begin",
            "page_starts",
            "",
            "lookup_operands",
            "give page_starts: int32 [B + 1], where each sequence begins in block_table, and the end of the last",
        )
    if len(table.shape) != 1:
        raise refuse(
            f"block_table has shape {list(table.shape)}, but with kv_lookup=sglang it is one list",
            "block_table.shape",
            table.shape,
            "lookup_operands",
            "give all sequences' pages end to end, or kv_lookup=vllm without page_starts",
        )
    check_index(tensors, "block_table", table.shape, "lookup_operands", "")
    count = sizes.batch + 1
    check_index(tensors, "page_starts", (count,), "batch_agrees", f"give {count} numbers")
    return Paging(page, pages, lookup, layout, table.shape[0]), min(table.shape[0] * page, MOST)


def _vllm(
    tensors: Tensors, sizes: Sizes, layout: KvLayout, page: int, pages: int, table: TensorDesc
) -> tuple[Paging, int]:
    if "page_starts" in tensors.inputs:
        raise refuse(
            "page_starts is for kv_lookup=sglang",
            "page_starts",
            tensors.inputs["page_starts"].shape,
            "lookup_operands",
            "leave page_starts out, or set kv_lookup=sglang",
        )
    if len(table.shape) != 2 or table.shape[0] != sizes.batch:
        raise refuse(
            f"block_table has shape {list(table.shape)}",
            "block_table.shape",
            table.shape,
            "lookup_operands",
            f"give a row of pages for each of the {sizes.batch} sequences, int32 [{sizes.batch}, pages]",
        )
    if table.dtype.value != "int32":
        raise refuse(
            f"block_table is {table.dtype}", "block_table.dtype", table.dtype.value, "index_dtype", "give int32 numbers"
        )
    if (table.strides[1] != 1 and table.shape[1] > 1) or (table.strides[0] < table.shape[1] and table.shape[0] > 1):
        raise refuse(
            "the rows of block_table have gaps or overlap",
            "block_table.strides",
            table.strides,
            "index_strides",
            "give rows whose numbers are neighbours",
        )
    stride = table.strides[0] if table.shape[0] > 1 else table.shape[1]
    return Paging(page, pages, KvLookup.VLLM, layout, stride), min(table.shape[1] * page, MOST)
