"""The page allocator: who owns what, and what happens at the edges."""

import pytest

pytest.importorskip("flax")

from jax_turboattn.models.serve import OutOfPages, PageAllocator


def test_allocates_every_page_once():
    allocator = PageAllocator(5)
    pages = allocator.allocate(2) + allocator.allocate(3)
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert allocator.num_free == 0


def test_exhaustion_takes_nothing():
    allocator = PageAllocator(3)
    allocator.allocate(2)
    with pytest.raises(OutOfPages, match=r"count must be <= 1 free pages, got 2"):
        allocator.allocate(2)
    assert allocator.num_free == 1
    assert allocator.allocate(0) == []
    assert len(allocator.allocate(1)) == 1


def test_released_pages_are_allocated_again():
    allocator = PageAllocator(2)
    pages = allocator.allocate(2)
    assert allocator.release(pages) == pages
    assert sorted(allocator.allocate(2)) == sorted(pages)


def test_shared_page_is_free_after_its_last_owner():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.share(pages[:1])
    assert allocator.release(pages) == pages[1:]
    assert allocator.num_free == 3
    assert allocator.release(pages[:1]) == pages[:1]
    assert allocator.num_free == 4


@pytest.mark.parametrize("page", [0, -1, 4])
@pytest.mark.parametrize("function", ["share", "release"])
def test_pages_that_are_not_in_use(function, page):
    allocator = PageAllocator(4)
    with pytest.raises(ValueError, match=f"{function}: pages must be in use, got page {page}"):
        getattr(allocator, function)([page])
